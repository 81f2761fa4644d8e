"""Seconds that a pipeline takes at least, from the chains of actions that wait for each other. Imports no torch.

A rank begins when the first micro-batch has come through all stages before its own, then computes all micro-batches.
Where backward passes are whole, the gradients of the last one go back through those stages afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from megalite.schedule.generate import V_SHAPED


@dataclass(frozen=True)
class Passes:
    """Seconds of a model's passes for one micro-batch.

    forward, backward: of all layers before each, and at last of all. weights: likewise of backward, what a split one
    leaves to W. embedding, head: forward, backward, and of that the weights' share.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    embedding: tuple[float, float, float]
    head: tuple[float, float, float]

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
    def each_layer(self) -> list[tuple[float, float]]:
        """Forward and backward of the layers that differ."""
        there, back = ([after - before for before, after in pairwise(each)] for each in (self.forward, self.backward))
        return sorted({(round(one, 12), round(two, 12)) for one, two in zip(there, back, strict=True)})

    @cached_property
    def least(self) -> tuple[float, float]:
        """The shortest forward and the shortest backward pass of a layer."""
        return min(there for there, _ in self.each_layer), min(back for _, back in self.each_layer)

    @cached_property
    def most(self) -> tuple[float, float]:
        """The longest ones."""
        return max(there for there, _ in self.each_layer), max(back for _, back in self.each_layer)

    @cached_property
    def shortest(self) -> float:
        """Of the layer that takes least, both passes."""
        return min(map(sum, self.each_layer))

    def first_waits(self, ranks: int, layers: int, more: float) -> float:
        """Seconds until a rank's first pass, on average, where each stage before has at least so many layers.

        more: seconds that each of these stages takes beside its layers.
        """
        if ranks == 1 or not layers:
            return 0.0
        embedding = self.embedding[0] * (ranks - 1)
        return (sum(self.forward[: ranks * layers : layers]) + embedding) / ranks + more * (ranks - 1) / 2

    def split_way(self, longer: float) -> float:
        """Seconds of a single micro-batch through all stages and back, where weight gradients can wait.

        longer: what halves of a pass take for one second of the whole.
        """
        return self.there + longer * (self.back - self.weights[-1] - self.head[2])

    def split_back(self, schedule: str, m: int, split: Sequence[int], longer: float) -> float:
        """Seconds of a pipeline whose backward passes are split.

        No micro-batch comes back to the first stage before it has gone all the way, and then all of the first stage's
        backward passes are left; likewise, the last micro-batch sets out when all of its forward passes are done.
        """
        first = split[0]
        there, back = self.forward[first] + self.embedding[0], self.backward[first] + self.embedding[1]
        way = self.split_way(longer) + (m - 1) * max(there, back)
        if schedule not in V_SHAPED:
            return way
        counts, (forward, inputs, weights) = longest_path(schedule, len(split) // 2, m), self._shortest_stage(split)
        return max(way, counts[0] * forward + longer * (counts[1] * inputs + counts[2] * weights))

    def _shortest_stage(self, split: Sequence[int]) -> tuple[float, float, float]:
        """Seconds that F, I and W take at least, whatever the stage."""
        ends = list(accumulate(split, initial=0))
        stages = []
        for stage, (first, last) in enumerate(pairwise(ends)):
            times = [each[last] - each[first] for each in (self.forward, self.backward, self.weights)]
            for place, end in ((0, self.embedding), (len(split) - 1, self.head)):
                if stage == place:
                    times = [time + more for time, more in zip(times, end, strict=True)]
            stages.append((times[0], times[1] - times[2], times[2]))
        forward, inputs, weights = (min(times) for times in zip(*stages, strict=True))
        return forward, inputs, weights


def longest_path(schedule: str, p: int, m: int) -> tuple[int, int, int]:
    """How many F, I and W lie on a path through a V-shaped schedule: a longest one while the pipeline is not full.

    No times of stages make a step shorter than any path. A test finds these paths in the schedules.
    """
    if schedule == "zbv":
        return 2 * max(m, p), 2 * (p + m - 1), 2 * min(m, p)
    if m <= p:
        return 2 * p, 2 * (p + m - 1), 2 * m + p - 1
    return 2 * m - 1, 2 * (p + m - 1), 3 * p + 1


class Moved(NamedTuple):
    """Seconds in which data-parallel ranks gather weights, reduce gradients over shards, and sum them over replicas;
    to copy what was gathered; and for each micro-batch, to add or copy gradients."""

    gathered: float
    reduced: float
    summed: float
    copied: float
    added: float


@dataclass(frozen=True)
class Exchanged:
    """What moves for parts of a model: for the layers that have least and most of it, the embedding (or the head), and
    all of them. last: seconds for each parameter of a rank at the end of a step."""

    least: Moved
    most: Moved
    end: Moved
    all: Moved
    last: float


class Chain(NamedTuple):
    """What a pipeline rank waits for and does.

    layers, stages: that it has. ends: whether the embedding and the head are among them. there, back: seconds of a
    micro-batch. wait: seconds of compute before its first one and after its last one. before: passes of stages in that
    time; hops: of these, how many have their input from another rank; layers_before: of these stages. first: layers of
    the first stage of its own. fewest: of any.
    """

    layers: int
    stages: int
    ends: tuple[bool, bool]
    there: float
    back: float
    wait: float
    before: int
    hops: int
    layers_before: int
    first: int
    fewest: int

    @property
    def busy(self) -> float:
        return self.there + self.back


class Turns(NamedTuple):
    """An interleaved rank, from the first micro-batch that reaches its last stage to the last one that leaves it.

    Meanwhile it does all it does but for passes of its other stages with a round of micro-batches at most, forward
    before and backward after. layers, ends: as in a chain. busy: seconds of a micro-batch. arrives, returns: seconds of
    compute from the first stage to this last one and back. hops: of them each, to other ranks. before: layers up to
    this stage. others: of its other stages, how many, their layers, and seconds of both passes. round: micro-batches.
    """

    layers: int
    ends: tuple[bool, bool]
    busy: float
    arrives: float
    returns: float
    hops: int
    before: int
    others: tuple[int, int, float]
    round: int


def turns(passes: Passes, split: Sequence[int], placement: Sequence[int], size: int) -> list[Turns]:
    """Of the ranks of an interleaved pipeline, with `size` micro-batches in the largest round: those that may be
    last."""
    there, back, moves = _by_stage(passes, split, placement)
    arrives, returns = (list(accumulate(each, initial=0.0)) for each in (there, back))
    hops, layers = list(accumulate(moves, initial=0)), list(accumulate(split, initial=0))
    found: dict[tuple[object, ...], Turns] = {}
    for own in _owned(placement).values():  # of equal ranks, the last waits longest
        last, busy = own[-1], sum(there[stage] + back[stage] for stage in own)
        ends, count = (0 in own, len(split) - 1 in own), sum(split[stage] for stage in own)
        others = len(own) - 1, count - split[last], busy - there[last] - back[last]
        key = round(busy, 12), ends, count, others[1]
        found[key] = Turns(count, ends, busy, arrives[last], returns[last], hops[last], layers[last], others, size)
    return list(found.values())


def chains(passes: Passes, split: Sequence[int], placement: Sequence[int], whole: bool) -> list[Chain]:
    """Of the ranks of a pipeline: those that may take longest.

    split, placement: by stage, its layers and its rank. whole: whether backward passes are.
    """
    there, back, moves = _by_stage(passes, split, placement)
    arrives, returns = (list(accumulate(each, initial=0.0)) for each in (there, back))
    hops, layers = list(accumulate(moves, initial=0)), list(accumulate(split, initial=0))
    alike: dict[tuple[object, ...], tuple[list[int], float, float]] = {}
    for own in _owned(placement).values():  # of equal ranks, the last waits longest
        go, come = (sum([each[stage] for stage in own]) for each in (there, back))
        mine = tuple([split[stage] for stage in own])
        alike[mine, own[0] == 0, own[-1] == len(split) - 1, round(go + come, 12)] = own, go, come
    both = 1 + whole
    return [
        Chain(
            sum(split[stage] for stage in own),
            len(own),
            (0 in own, len(split) - 1 in own),
            go,
            come,
            arrives[own[0]] + returns[own[0]] * whole,
            own[0] * both,
            hops[own[0]] * both,
            layers[own[0]],
            split[own[0]],
            min(split[stage] for stage in own),
        )
        for own, go, come in alike.values()
    ]


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
