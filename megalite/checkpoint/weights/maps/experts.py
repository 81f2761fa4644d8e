"""Experts as transformers has them: their keys in config.json, and their tensors. Imports no torch.

Files have a tensor for every matrix of every expert. In memory, transformers 5 has those of a layer stacked, gate and
up in one, and saves them so if it is told to (`save_original_format=False`); such files are read too. Factors of losses
do not carry over: transformers' loss is another one, and is not computed unless it is asked for.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.strips import Theirs, part
from megalite.config.schema import Experts, Model
from megalite.plan.parts.part import Weight

EXPERTS = {  # tensors of a layer with experts, `{}` the number of one, and ours
    "mlp.gate.weight": ("mlp.router.weight",),
    "mlp.experts.{}.gate_proj.weight": ("mlp.experts.gate.weight",),
    "mlp.experts.{}.up_proj.weight": ("mlp.experts.up.weight",),
    "mlp.experts.{}.down_proj.weight": ("mlp.experts.down.weight",),
}
STACKED_EXPERTS = {  # the same in every family
    "mlp.gate.weight": ("mlp.router.weight",),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate.weight", "mlp.experts.up.weight"),
    "mlp.experts.down_proj": ("mlp.experts.down.weight",),
}


def are_stacked(names: Iterable[str]) -> bool:
    """Return whether tensors of these names have all experts of a layer in one."""
    return any(name.endswith("mlp.experts.gate_up_proj") for name in names)


def of_experts(name: str, parts: Mapping[str, Weight]) -> Iterator[tuple[str, Theirs]]:
    """Tensors, one for each expert if `name` has a place for its number, of our weights one upon another."""
    (count,) = {weight.shape[0] for weight in parts.values()}
    each = [_of_expert(number, parts) for number in range(count)]
    if "{}" in name:
        yield from ((name.format(number), theirs) for number, theirs in enumerate(each))
    else:
        strips = chain.from_iterable(theirs.strips for theirs in each)
        yield name, Theirs((count, *each[0].shape), tuple(strips))


def _of_expert(number: int, parts: Mapping[str, Weight]) -> Theirs:
    strips = []
    for name, weight in parts.items():
        _, rows, columns = weight.shape
        strips.append(part(name, weight, rows=(number * rows, (number + 1) * rows)))
    return Theirs((sum(strip.height for strip in strips), columns), tuple(strips))


def experts(fields: Fields, count: int, **more: Any) -> Experts:
    """The experts that a config.json tells; `count`: as many as there are if it does not say, `more`: other keys."""
    # Versions of transformers differ in which of the two names a family has.
    key = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    return Experts(count=fields.whole(key, count), active=fields.whole("num_experts_per_tok"), **more)


def with_width(model: Model) -> Experts:
    """The experts of a model that has some, with their width told."""
    assert model.experts is not None  # else no family with experts is asked
    return replace(model.experts, width=model.experts.width or model.ffn)
