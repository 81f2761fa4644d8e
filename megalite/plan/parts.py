"""The embedding, a layer or the head of a stage: what a rank keeps of it for backward, and what backward takes.

Backward of a part is a sequence of moments. Each has temporaries, and ends with the release of some of what was kept.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from megalite.plan.size import Parameters

Item = tuple[str, str]  # one of the kinds of `plan.memory`, or HOST, and the component of the model


@dataclass(frozen=True)
class Kept:
    """A tensor, or several of one fate, that a forward pass leaves for backward."""

    component: str
    bytes: int
    until: str  # the moment of backward that uses it last
    for_weights: str = ""  # the moment whose gradients of weights need it: a split backward keeps it until W
    cheap: bool = False  # selective recompute makes it again when backward needs it


@dataclass(frozen=True)
class Moment:
    """A place in the backward pass of a part where memory may peak."""

    name: str
    temporaries: int
    weights: int = 0  # gradients of weights made here, which stay at least until those of the whole part are there
    put_off: int = 0  # gradients of outputs that a split backward keeps until W
    again: int = 0  # temporaries of W, which makes them from what is put off


@dataclass(frozen=True)
class Weights:
    """How many elements parameters have, and all states that the optimizer keeps of them."""

    parameters: Parameters
    states: Parameters

    @cached_property
    def total(self) -> int:
        """Parameters."""
        return self.parameters.total

    @cached_property
    def by_component(self) -> tuple[tuple[str, int, int], ...]:
        """The components of the model that have parameters here, how many, and how many states."""
        both = zip(asdict(self.parameters).items(), asdict(self.states).values(), strict=True)
        return tuple((name, count, states) for (name, count), states in both if count)


@dataclass(frozen=True)
class Part:
    """The embedding, a layer or the head of a stage, as one rank holds it."""

    name: str
    weights: Weights  # on this rank, before data-parallel sharding
    newest: int  # elements of the last of them
    kept: tuple[Kept, ...]
    forward: int  # temporaries of the forward pass, where it takes most
    backward: tuple[Moment, ...]  # in order
    remade: tuple[Kept, ...] = ()  # made again when backward begins, by full recompute
    cheap: tuple[Kept, ...] = ()  # made again when backward needs it, by selective recompute
    offloaded: tuple[Kept, ...] = ()  # in host memory until backward comes to the part after
    puts_off: bool = False  # a split backward leaves the gradients of weights to W
    with_stage: bool = False  # a tied embedding, used at both ends, is gathered as long as its stage is in use
    copy: bool = False  # of the tied embedding of the first stage
    times: int = 1  # how many like it stand here one behind the other; bytes are then of all, parameters of one

    @cached_property
    def again(self) -> dict[str, int]:
        """By moment of backward: bytes that selective recompute makes again for it."""
        return {at.name: sum(kept.bytes for kept in self.cheap if kept.until == at.name) for at in self.backward}

    @cached_property
    def freed(self) -> dict[str, Counter[Item]]:
        """By moment of backward: the bytes that the layer's backward needs no more."""
        return {at.name: _bytes(held for held in self._held if held[1].until == at.name) for at in self.backward}

    @cached_property
    def retained(self) -> dict[str, Counter[Item]]:
        """By moment of a backward that is split: what goes on being held for W, and what W is left to be made of."""
        needed = [(kind, kept) for kind, kept in self._for_backward if kept.for_weights]
        return {
            at.name: _bytes(held for held in needed if held[1].until == at.name) + _put_off(at) for at in self.backward
        }

    @cached_property
    def put_off(self) -> dict[str, Counter[Item]]:
        """By moment of a backward that is split: what is held for its W, which frees it."""
        needed = self._for_backward
        return {
            at.name: _bytes(held for held in needed if held[1].for_weights == at.name) + _put_off(at)
            for at in self.backward
        }

    @cached_property
    def _for_backward(self) -> list[tuple[str, Kept]]:
        """What is held or made again for backward, and its kind."""
        return [*self._held, *(("temporaries", kept) for kept in self.cheap)]

    @cached_property
    def _held(self) -> list[tuple[str, Kept]]:
        """What is held from forward, or from the beginning of backward, and its kind."""
        made = [("temporaries", kept) for kept in (*self.remade, *self.offloaded)]
        return [*(("activations", kept) for kept in self.kept), *made]

    def repeated(self, times: int) -> "Part":
        """So many of these as one."""

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
