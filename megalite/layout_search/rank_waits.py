"""Counts of layers that each pipeline rank runs and waits for: the same for all times of layers. Imports no torch."""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise
from operator import add, sub
from typing import NamedTuple

from megalite.layout_search.pipeline_bounds import Chain, Counts, Passes, Turns, Work
from megalite.layout_search.turn_bounds import Pairs


class _Rank(NamedTuple):
    """A rank. before: work of the stages before the first one of its own, and before the last one."""

    work: Work
    first_stage: int
    before: tuple[Work, Work]
    last_stage: int
    others: Work
    first: Counts
    fewest: int


class _Stage(NamedTuple):
    counts: Counts
    ends: tuple[bool, bool]


class Ranks:
    """The ranks of a pipeline, and its stages, those that differ.

    split, placement: by stage, its layers and its rank. order: by layer, the number of its kind. kinds: how many.
    """

    def __init__(self, split: Sequence[int], placement: Sequence[int], order: Sequence[int], kinds: int) -> None:
        self.split, self.begins = split, list(accumulate(split, initial=0))
        self.hops = [0, *accumulate(int(before != after) for before, after in pairwise(placement))]
        last = len(split) - 1
        stages = []  # work of each
        for stage, (begin, end) in enumerate(pairwise(self.begins)):
            counts = tuple([order[begin:end].count(kind) for kind in range(kinds)]) if kinds > 1 else (end - begin,)
            edges = tuple([int(stage > 0 and begin < end and order[begin] == kind) for kind in range(kinds)])
            stages.append(Work(counts, (stage == 0, stage == last), edges))
        nothing = Work((0,) * kinds, (False, False), (0,) * kinds)
        before = list(accumulate(stages, _joined, initial=nothing))  # work of the stages before each
        self.works, self.all = stages, before[-1]
        self.stages = list(dict.fromkeys(_Stage(work.layers, work.ends) for work in stages))
        owned: dict[int, list[int]] = {}
        for stage, rank in enumerate(placement):
            owned.setdefault(rank, []).append(stage)
        self.ranks: dict[tuple[object, ...], _Rank] = {}  # keeps the last of equal ranks, which waits longest
        for own in owned.values():
            sizes = tuple([split[stage] for stage in own])
            *others, last_work = [stages[stage] for stage in own]
            work = reduce(_joined, [*others, last_work])
            self.ranks[sizes, work, last_work] = _Rank(
                work,
                own[0],
                (before[own[0]], before[own[-1]]),
                own[-1],
                reduce(_joined, others, nothing),
                stages[own[0]].layers,
                min(sizes),
            )

    def chains(self, passes: Passes, whole: bool, pairs: Pairs | None = None) -> list[Chain]:
        """Waits and work of each rank. whole: backward passes are not split. pairs: of passes that take turns; a rank
        that computes some alone takes no less time than if all did so."""
        both, found = 1 + whole, []
        for rank in self.ranks.values():
            there, back = passes.of(rank.work.layers, rank.work.ends)
            if pairs is not None:
                second = tuple(map(sub, rank.work.layers, rank.first))
                there, back = passes.of((0,) * len(second), rank.work.ends)
                there += pairs.of(rank.first, second)
            first, wait = rank.first_stage, 0.0
            if first:
                wait = passes.forward[self.begins[first]] + passes.embedding[0]
                wait += (passes.backward[self.begins[first]] + passes.embedding[1]) * whole
            hops = self.hops[first] * both
            found.append(Chain(rank.work, there, back, wait, rank.before[0], hops, rank.first, rank.fewest))
        return found

    def turns(self, passes: Passes, size: int) -> list[Turns]:
        """Turns of the ranks of an interleaved pipeline, with `size` micro-batches in the largest round."""
        found = []
        for rank in self.ranks.values():
            busy, others = (sum(passes.of(work.layers, work.ends)) for work in (rank.work, rank.others))
            arrives, returns = (
                each[self.begins[rank.last_stage]] + (rank.last_stage > 0) * end
                for each, end in ((passes.forward, passes.embedding[0]), (passes.backward, passes.embedding[1]))
            )
            hops = self.hops[rank.last_stage]
            found.append(Turns(rank.work, busy, arrives, returns, hops, rank.before[1], rank.others, others, size))
        return found

    def shortest(self, passes: Passes) -> tuple[float, float, float]:
        """Seconds that F, I and W take at least, whatever the stage."""
        forward, inputs, weights = [], [], []
        for counts, ends in self.stages:
            there, back = passes.of(counts, ends)
            put_off = passes.weights_of(counts, ends)
            forward.append(there)
            inputs.append(back - put_off)
            weights.append(put_off)
        return min(forward), min(inputs), min(weights)


def _joined(one: Work, other: Work) -> Work:
    """Work of both."""
    ends = one.ends[0] or other.ends[0], one.ends[1] or other.ends[1]
    return Work(tuple(map(add, one.layers, other.layers)), ends, tuple(map(add, one.edges, other.edges)))
