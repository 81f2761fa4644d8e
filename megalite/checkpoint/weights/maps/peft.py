"""Factors of adapters as PEFT names them, beside the tensors of a family. Imports no torch.

PEFT has a pair of factors for a module of transformers, and for a parameter with all experts of a layer. Where that is
several of our matrices in one, such as Phi-3's `qkv_proj`, they share its first factor, and each has its rows of the
second; or each has its own of the rank, and the second factor is block-diagonal. With E experts, the first factor is
`[E · rank, in]`, one expert after another, and the second `[out, rank · E]`, whose columns are of experts in turns.
PEFT's first factor of the embedding is our second one transposed, and the other way round. With DoRA, PEFT has the norm
of every row, and we what is added to that of the base's row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megalite.base.errors import InputError, listing
from megalite.checkpoint.store.index import Index
from megalite.checkpoint.weights.maps.experts import EXPERTS
from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.strips import Strip, Theirs, part
from megalite.config.model_schema import Adapter, Model
from megalite.config.schema import Config
from megalite.plan.model.weights import held_weights, weights
from megalite.plan.parts.adapted import factor_names, magnitude_name, target
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import RoleKind

BEGIN = "base_model.model."  # a beginning that every name in PEFT's files has
INNER, OUTER = ".base_layer", "down_proj"  # PEFT wraps experts once for each parameter


@dataclass(frozen=True)
class Factor(Theirs):
    """A factor of a module whose elements are in another order than ours: the second one, `[out, rank · E]`.

    strips: rows of our second factors, in its order; with experts, those of the first. columns: the first column of
    each of these by name, before experts take turns; elsewhere it is 0. experts: 0: it is that of a module.
    transposed: it is that of a transposed factor, as both of the embedding are.
    """

    columns: Mapping[str, int] = field(default_factory=dict)
    experts: int = 0
    transposed: bool = False

    def rows(self) -> Iterator[tuple[Strip, slice]]:
        """Yield every strip with its rows here."""
        first = 0
        for number, strip in enumerate(self.strips):
            yield strip, slice(number, None, self.turns) if self.turns else slice(first, first + strip.height)
            first += strip.height


@dataclass(frozen=True)
class Within:
    """The place of one of our factors, called `ours`: in the tensor `name` of `index`, which is `theirs`."""

    index: Index
    name: str
    theirs: Factor
    ours: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Module:
    """A module of transformers, or a parameter with all experts of a layer, that may have a pair of factors.

    ours: the matrices of ours that it is made of. strips, turns: as of `Factor`. experts: as many; 0: it is a
    module. embedding: it is the model's.
    """

    name: str  # in transformers
    ours: tuple[str, ...]
    strips: tuple[Strip, ...]
    turns: int
    experts: int
    embedding: bool

    @property
    def short(self) -> str:
        """The name without the number of the layer, as PEFT's configuration has it."""
        return self.name.rpartition(".")[2]

    @property
    def factors(self) -> tuple[str, str]:
        """The names of the two factors in PEFT's file."""
        wrapper = self.name
        if self.embedding:
            return f"{BEGIN}{wrapper}.lora_embedding_A", f"{BEGIN}{wrapper}.lora_embedding_B"
        if self.experts:
            wrapper = wrapper.removesuffix(f".{self.short}") + INNER * (self.short != OUTER)
        return f"{BEGIN}{wrapper}.lora_A.weight", f"{BEGIN}{wrapper}.lora_B.weight"

    @property
    def magnitude(self) -> str:
        """The name of the norms of rows in PEFT's file."""
        return f"{BEGIN}{self.name}.lora_magnitude_vector"

    def table(self, adapter: Adapter, held: Mapping[str, Weight], shares: bool) -> dict[str, Theirs]:
        """Return PEFT's tensors, as made of ours. held: our factors. shares: our matrices have one first factor."""
        found = self._factors(adapter.rank, held, shares)
        if adapter.dora:
            strips = tuple(Strip(magnitude_name(name), rows, (0, 1)) for name, rows, _ in self.strips)
            found[self.magnitude] = Theirs((sum(strip.height for strip in strips),), strips)
        return found

    def _factors(self, rank: int, held: Mapping[str, Weight], shares: bool) -> dict[str, Theirs]:
        pairs = [factor_names(each) for each in self.ours]
        if self.embedding:
            return {
                theirs: Factor(
                    (columns, rows), (Strip(name, (0, rows), (0, columns)),), columns={name: 0}, transposed=True
                )
                for theirs, name in zip(self.factors, reversed(pairs[0]), strict=True)
                for rows, columns in [held[name].shape]
            }
        count, experts = 1 if shares else len(pairs), self.experts or 1
        inputs = held[pairs[0][0]].shape[-1]
        each = [
            part(first, held[first], rows=(number * rank, (number + 1) * rank))
            for number in range(experts)
            for first, _ in pairs[:count]
        ]
        strips = tuple(Strip(factor_names(name)[1], rows, (0, rank)) for name, rows, _ in self.strips)
        outputs = sum(strip.height for strip in strips)
        columns = {second: number % count * rank for number, (_, second) in enumerate(pairs)}
        first, second = self.factors
        return {
            first: Theirs((experts * count * rank, inputs), tuple(each)),
            second: Factor(
                (outputs, count * rank * experts), strips, turns=self.turns, columns=columns, experts=self.experts
            ),
        }


def modules(family: Family, model: Model) -> list[Module]:
    """All of a model that can have factors. A tied embedding cannot: what it adds belongs to one of its two uses."""
    found, ours = list[Module](), weights(model)
    for name, theirs in family.table(model, stacked_experts=True).items():
        sources = tuple(dict.fromkeys(strip.name for strip in theirs.strips))
        embedding = ours[sources[0]].role.kind is RoleKind.EMBEDDING
        if all(target(each, ours[each]) for each in sources) and not (embedding and model.tie_embeddings):
            experts = theirs.shape[0] if len(theirs.shape) == 3 else 0
            strips = theirs.strips[: len(theirs.strips) // (experts or 1)]
            found.append(Module(name.removesuffix(".weight"), sources, strips, theirs.turns, experts, embedding))
    return found


def adapted(family: Family, model: Model, adapter: Adapter) -> list[Module]:
    """The modules in which the matrices of an adapter are. Raises InputError for those that PEFT cannot have."""
    ours = weights(model)
    held = held_weights(Config(model=model, adapter=adapter).model)
    found = list[Module]()
    for module in modules(family, model):
        missing = [each for each in module.ours if factor_names(each)[0] not in held]
        if len(missing) == len(module.ours):
            continue
        if missing:
            targets = listing(sorted({target(each, ours[each]) or "" for each in missing}), "and")
            rule = f"has one pair of factors for {module.name}, to which {targets} belongs too, without an adapter here"
            raise InputError(f"PEFT {rule}; merge the adapter in place of that")
        if not module.experts and f"mlp.experts.{{}}.{module.short}.weight" in EXPERTS.keys() & family.experts.keys():
            rule = f"takes {module.short} of {family.model_type} for a name of its experts, not of {module.name}"
            raise InputError(f"PEFT {rule}; merge the adapter in place of that")
        found.append(module)
    return found
