"""Factors of adapters as PEFT names them, beside the tensors of a family. Imports no torch.

PEFT has a pair of factors for a module of transformers. Where that is several of our matrices in one, such as Phi-3's
`qkv_proj`, they share its first factor, and each has its rows of the second.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megalite.base.errors import InputError, listing
from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.strips import Strip, Table, Theirs, stacked
from megalite.config.schema import Adapter, Config, Model
from megalite.plan.model.weights import held_weights, weights
from megalite.plan.parts.adapted import factor_names, target

BEGIN = "base_model.model."  # a beginning that every name in PEFT's files has


@dataclass(frozen=True)
class Module:
    """A module of transformers. ours: matrices of ours that it is made of. rows: of these, in its order."""

    ours: tuple[str, ...]
    rows: tuple[Strip, ...]


def modules(family: Family, model: Model) -> dict[str, Module]:
    """The modules of all layers that can have adapters, by their names in transformers; experts are left out."""
    found, ours = dict[str, Module](), weights(model)
    for name, theirs in family.table(model, stacked_experts=True).items():
        sources = tuple(dict.fromkeys(strip.name for strip in theirs.strips))
        if all(target(each, ours[each]) not in (None, "experts") for each in sources):
            found[name.removesuffix(".weight")] = Module(sources, theirs.strips)
    return found


def table(family: Family, model: Model, adapter: Adapter) -> Table:
    """The tensors of PEFT's file, as made of our factors. Raises InputError for those that it has no names for."""
    held = held_weights(Config(model=model, adapter=adapter).model)
    found: dict[str, Theirs] = {}
    for name, module in modules(family, model).items():
        pairs = [factor_names(each) for each in module.ours]
        if not any(first in held for first, _ in pairs):
            continue
        if len(pairs) > 1:
            rule = f"has one pair of factors for {name}, which is {listing(list(module.ours), 'and')} here"
            raise InputError(f"PEFT {rule}; merge the adapter in place of that")
        ((first, second),) = pairs
        strips = tuple(Strip(second, strip.rows, (0, adapter.rank)) for strip in module.rows)
        found[f"{BEGIN}{name}.lora_A.weight"] = stacked([(first, held[first])])
        found[f"{BEGIN}{name}.lora_B.weight"] = Theirs((sum(each.height for each in strips), adapter.rank), strips)
    left = held.keys() - {strip.name for theirs in found.values() for strip in theirs.strips}
    if left:
        rule = "PEFT's file is not written with factors of experts"
        raise InputError(f"{rule}, {min(left)} among them; merge the adapter in place of that")
    return found


def named(found: Mapping[str, Module]) -> Iterator[tuple[str, str, str, Module]]:
    """Yield of every module: the names of its factors in PEFT's file, its name, and itself."""
    for name, module in found.items():
        yield f"{BEGIN}{name}.lora_A.weight", f"{BEGIN}{name}.lora_B.weight", name, module
