"""Seconds that a pipeline takes at least, from the chains of actions that wait for each other. Imports no torch.

A rank begins when the first micro-batch has come through all stages before its own, then computes all micro-batches.
Where backward passes are whole, the gradients of the last one go back through those stages afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Passes:
    """Seconds of a model's passes for one micro-batch.

    forward, backward: of all layers before each, and at last of all. embedding, head: forward and backward. weights: of
    all backward passes, what weight gradients take.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    embedding: tuple[float, float]
    head: tuple[float, float]
    weights: float

    @property
    def there(self) -> float:
        return self.forward[-1] + self.embedding[0] + self.head[0]

    @property
    def back(self) -> float:
        return self.backward[-1] + self.embedding[1] + self.head[1]

    @property
    def layers(self) -> int:
        return len(self.forward) - 1

    @cached_property
    def each_forward(self) -> list[float]:
        """By layer."""
        return [after - before for before, after in pairwise(self.forward)]

    @cached_property
    def each_backward(self) -> list[float]:
        """By layer."""
        return [after - before for before, after in pairwise(self.backward)]

    @cached_property
    def shortest_backward(self) -> float:
        """Of the layer whose backward pass takes least."""
        return min(self.each_backward)

    @cached_property
    def longest(self) -> tuple[float, float]:
        """The longest forward and the longest backward pass of a layer."""
        return max(self.each_forward), max(self.each_backward)

    @cached_property
    def shortest(self) -> float:
        """Of the layer that takes least, both passes."""
        return min(map(sum, zip(self.each_forward, self.each_backward, strict=True)))


@dataclass(frozen=True)
class Exchanged:
    """Seconds in which data-parallel ranks gather weights, reduce gradients over shards, and sum them over replicas.

    layer: of the layer that takes least. end: of the embedding, or of the head. layers: of all layers.
    """

    layer: tuple[float, float, float]
    end: tuple[float, float, float]
    layers: tuple[float, float, float]


@dataclass(frozen=True)
class Chain:
    """What a pipeline rank waits for and does.

    layers, stages: that it has. busy: seconds of a micro-batch. wait: seconds of compute before its first one and after
    its last one. before: passes of stages in that time. hops: of these, how many have their input from another rank.
    behind: layers that the last one goes back through at the end. ends: the fewest layers of one of its stages.
    """

    layers: int
    stages: int
    busy: float
    wait: float
    before: int
    hops: int
    behind: int
    ends: int


@dataclass(frozen=True)
class Turns:
    """An interleaved rank, from the first micro-batch that reaches its last stage to the last one that leaves it.

    busy: seconds of a micro-batch. arrives, returns: seconds of compute from the first stage to this last one and back.
    hops: of them each, to other ranks. before: layers up to this stage. size: of the first round, the largest. stages:
    of each of its stages, the layers and the seconds of a forward and of a backward pass.
    """

    busy: float
    arrives: float
    returns: float
    hops: int
    before: int
    size: int
    stages: tuple[tuple[int, float, float], ...]

    def seconds(self, m: int, data: Exchanged, hop: float, overlap: float) -> float:
        """Of `m` micro-batches at least, where gradients are reduced once a step. hop: seconds of one."""
        meanwhile = self.size * sum(there + back for _, there, back in self.stages[:-1])
        back = min(back / layers for layers, _, back in self.stages if layers)
        slower = overlap * min(back, data.layer[1] + data.layer[2])
        return self.arrives + self.returns + 2 * self.hops * hop + m * self.busy - meanwhile + self.before * slower


def turns(passes: Passes, split: Sequence[int], placement: Sequence[int], size: int) -> list[Turns]:
    """Of the ranks of an interleaved pipeline, with `size` micro-batches in the first round: those that may be last."""
    there, back, moves = _by_stage(passes, split, placement)
    arrives, returns = (list(accumulate(each, initial=0.0)) for each in (there, back))
    hops = list(accumulate(moves, initial=0))
    found: dict[tuple[object, ...], Turns] = {}
    for own in _owned(placement).values():  # of equal ranks, the last waits longest
        stages = tuple((split[stage], there[stage], back[stage]) for stage in own)
        last, busy = own[-1], sum(there[stage] + back[stage] for stage in own)
        key = round(busy, 12), *(layers for layers, _, _ in stages)
        found[key] = Turns(busy, arrives[last], returns[last], hops[last], sum(split[: last + 1]), size, stages)
    return list(found.values())


def chains(passes: Passes, split: Sequence[int], placement: Sequence[int], whole: bool) -> list[Chain]:
    """Of the ranks of a pipeline: those that may take longest.

    split, placement: by stage, its layers and its rank. whole: whether backward passes are.
    """
    there, back, moves = _by_stage(passes, split, placement)
    arrives, returns = (list(accumulate(each, initial=0.0)) for each in (there, back))
    hops = list(accumulate(moves, initial=0))
    found: dict[tuple[float, ...], Chain] = {}
    for own in _owned(placement).values():  # of equal ranks, the last waits longest
        layers, busy = [split[stage] for stage in own], sum(there[stage] + back[stage] for stage in own)
        begins, both = own[0], 1 + whole
        waits = arrives[begins] + returns[begins] * whole
        key = sum(layers), round(busy, 12), min(layers)
        behind = sum(split[: begins + 1]) * whole
        found[key] = Chain(sum(layers), len(own), busy, waits, begins * both, hops[begins] * both, behind, min(layers))
    return list(found.values())


def _by_stage(
    passes: Passes, split: Sequence[int], placement: Sequence[int]
) -> tuple[list[float], list[float], list[int]]:
    """By stage: forward, backward, and 1 where the next stage is on another rank."""
    ends = list(accumulate(split, initial=0))
    there = [passes.forward[end] - passes.forward[begin] for begin, end in pairwise(ends)]
    back = [passes.backward[end] - passes.backward[begin] for begin, end in pairwise(ends)]
    for stage, outer in ((0, passes.embedding), (len(split) - 1, passes.head)):
        there[stage], back[stage] = there[stage] + outer[0], back[stage] + outer[1]
    return there, back, [int(before != after) for before, after in pairwise(placement)]


def _owned(placement: Sequence[int]) -> dict[int, list[int]]:
    """By rank: its stages."""
    found: dict[int, list[int]] = {}
    for stage, rank in enumerate(placement):
        found.setdefault(rank, []).append(stage)
    return found
