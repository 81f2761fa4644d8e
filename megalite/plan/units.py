"""Units of a stage, which FSDP2 gathers one by one (embedding, layers, head): what a rank keeps, what backward takes.

Backward of a unit is a sequence of moments. Each moment has temporaries. At its end some kept tensors are released.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from megalite.plan.model.size import Parameters
from megalite.plan.parts.part import Kept, Moment, in_four_bits

FURTHER = "embedding of further tokens"  # name of the unit with which multi-token prediction begins
Item = tuple[str, str]  # a kind of `plan.memory`, or HOST, and a component of the model


@dataclass(frozen=True)
class Weights:
    """Numbers of elements: parameters, those that are trained, all optimizer states, and copies beside these states.

    newest: of gradients that FSDP2 still holds while it reduces those of all weights. twice: of gradients that are
    there beside all wide ones at most, while FSDP2 widens one after the other. recut: of weights that it shards along
    another dimension than the first, and copies once more to put shards together; last_recut: of the last one.
    four_bits: of parameters that are kept so.
    """

    parameters: Parameters
    trained: Parameters
    states: Parameters
    copies: Parameters
    newest: int
    twice: int
    recut: int
    last_recut: int
    four_bits: Parameters

    @cached_property
    def total(self) -> int:
        """The number of parameters."""
        return self.parameters.total

    def gathered(self, each: int) -> int:
        """Bytes of the parameters where layers compute with them, `each` for those that are not in four bits."""
        return each * (self.total - self.four_bits.total) + in_four_bits(self.four_bits.total)

    @cached_property
    def gradients(self) -> int:
        """The number of parameters that are trained, so have gradients."""
        return self.trained.total

    @cached_property
    def by_component(self) -> tuple[tuple[str, int, int, int, int, int], ...]:
        """Each component of the model that has parameters here, with the numbers of its elements: the first four, and
        those in four bits."""
        counts = self.parameters, self.trained, self.states, self.copies, self.four_bits
        numbers = (asdict(each).values() for each in counts)
        return tuple(row for row in zip(asdict(self.parameters), *numbers, strict=True) if row[1])


@dataclass(frozen=True)
class Unit:
    """The embedding, a layer or the head of a stage, as one rank holds it."""

    name: str
    weights: Weights  # on this rank, before data-parallel sharding
    kept: tuple[Kept, ...]
    forward: int  # temporaries of the forward pass, where it takes most
    backward: tuple[Moment, ...]  # in order
    remade: tuple[Kept, ...] = ()  # made again when backward begins, by full recompute
    cheap: tuple[Kept, ...] = ()  # made again when backward needs it, by selective recompute
    offloaded: tuple[Kept, ...] = ()  # in host memory until backward reaches the unit that follows in the model
    pauses: tuple[tuple[int, int], ...] = ()  # in forward: temporaries, and bytes of `kept` not made yet
    puts_off: bool = False  # a split backward leaves the weight gradients to W
    with_stage: bool = False  # a tied embedding, used at both ends, is gathered as long as its stage is in use
    copy: bool = False  # a copy of the first stage's tied embedding
    casts: int = 0  # bytes of the weights in 8 bits, in both layouts
    apart: Weights | None = None  # experts that ranks share out, which FSDP2 gathers by themselves, over other ranks
    rows: int = 0  # bytes of the tokens of these experts, whose gradients have come when they are gathered
    times: int = 1  # how many equal units in a row this one stands for; bytes are of all, parameters of one

    def gathered(self, each: int) -> int:
        """Bytes of all parameters, as `Weights.gathered`."""
        return self.weights.gathered(each) + (self.apart.gathered(each) if self.apart is not None else 0)

    @cached_property
    def gradients(self) -> int:
        """Number of all parameters that are trained."""
        return self.weights.gradients + (self.apart.gradients if self.apart is not None else 0)

    @cached_property
    def again(self) -> dict[str, int]:
        """By moment of backward: bytes that selective recompute makes again for it."""
        return {at.name: sum(kept.bytes for kept in self.cheap if kept.until == at.name) for at in self.backward}

    @cached_property
    def freed(self) -> dict[str, Counter[Item]]:
        """By moment of backward: bytes of the kept tensors that are needed for the last time at that moment."""
        return {at.name: _bytes(held for held in self._held if held[1].until == at.name) for at in self.backward}

    @cached_property
    def retained(self) -> dict[str, Counter[Item]]:
        """By moment of a split backward: bytes that stay for W, of kept tensors and of output gradients."""
        needed = [(kind, kept) for kind, kept in self._for_backward if kept.for_weights]
        return {
            at.name: _bytes(held for held in needed if held[1].until == at.name) + _put_off(at) for at in self.backward
        }

    @cached_property
    def put_off(self) -> dict[str, Counter[Item]]:
        """By moment of a split backward: bytes that are held until W makes the moment's weight gradients."""
        needed = self._for_backward
        return {
            at.name: _bytes(held for held in needed if held[1].for_weights == at.name) + _put_off(at)
            for at in self.backward
        }

    @cached_property
    def _for_backward(self) -> list[tuple[str, Kept]]:
        """All tensors that are held or made again for backward, with their kinds."""
        return [*self._held, *(("temporaries", kept) for kept in self.cheap)]

    @cached_property
    def _held(self) -> list[tuple[str, Kept]]:
        """The tensors that are held from forward on, or from the beginning of backward on, with their kinds."""
        made = [("temporaries", kept) for kept in (*self.remade, *self.offloaded)]
        return [*(("activations", kept) for kept in self.kept), *made]

    @cached_property
    def missing(self) -> tuple[int, int]:
        """Bytes of `remade` that are not made yet where backward gives way: all, then those of arrivals."""
        return sum(kept.bytes for kept in self.remade), sum(kept.bytes for kept in self.remade if kept.of_arrivals)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes on the device that a forward pass keeps."""
        return sum(kept.bytes for kept in self.kept)

    @cached_property
    def put_off_bytes(self) -> int:
        """Bytes that an I leaves to its W."""
        return sum(held.total() for held in self.put_off.values())

    @cached_property
    def change(self) -> dict[tuple[str, bool], int]:
        """By moment of backward, and whether weight gradients are put off: by how much it changes the bytes kept."""
        freed = {at.name: self.freed[at.name].total() for at in self.backward}
        return {
            (at.name, puts_off): puts_off * self.retained[at.name].total() - freed[at.name]
            for at in self.backward
            for puts_off in (False, True)
        }

    def repeated(self, times: int) -> "Unit":
        """A unit that stands for `times` units like this one."""

        def all_of(group: tuple[Kept, ...]) -> tuple[Kept, ...]:
            return tuple(replace(kept, bytes=times * kept.bytes) for kept in group)

        moments = tuple(replace(x, weights=times * x.weights, put_off=times * x.put_off) for x in self.backward)
        return replace(
            self,
            kept=all_of(self.kept),
            backward=moments,
            remade=all_of(self.remade),
            cheap=all_of(self.cheap),
            offloaded=all_of(self.offloaded),
            times=times,
        )


def _put_off(moment: Moment) -> Counter[Item]:
    return Counter({("gradients", "put off"): moment.put_off})


def _bytes(group: Iterable[tuple[str, Kept]]) -> Counter[Item]:
    found: Counter[Item] = Counter()
    for kind, kept in group:
        found[kind, kept.component] += kept.bytes
    return found
