"""Counts of layers that each pipeline rank runs and waits for: the same for all times of layers. Imports no torch."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from megalite.layout_search.pipeline_bounds import Chain, Passes, Turns

Counts = tuple[int, ...]  # layers by kind


class _Rank(NamedTuple):
    """A rank. The first stage of its own begins after `first` layers, the last one after `last`."""

    counts: Counts
    stages: int
    ends: tuple[bool, bool]
    first_stage: int
    first: int
    last_stage: int
    last: int
    last_counts: Counts
    first_size: int
    fewest: int


class _Stage(NamedTuple):
    counts: Counts
    ends: tuple[bool, bool]


class Ranks:
    """The ranks of a pipeline, and its stages, those that differ.

    split, placement: by stage, its layers and its rank. order: by layer, the number of its kind. kinds: how many.
    """

    def __init__(self, split: Sequence[int], placement: Sequence[int], order: Sequence[int], kinds: int) -> None:
        begins = list(accumulate(split, initial=0))
        self.split = split
        self.hops = [0, *accumulate(int(before != after) for before, after in pairwise(placement))]
        counts = [
            tuple(order[begin:end].count(kind) for kind in range(kinds)) if kinds > 1 else (end - begin,)
            for begin, end in pairwise(begins)
        ]
        outer = [(stage == 0, stage == len(split) - 1) for stage in range(len(split))]
        self.stages = list(dict.fromkeys(map(_Stage, counts, outer)))
        owned: dict[int, list[int]] = {}
        for stage, rank in enumerate(placement):
            owned.setdefault(rank, []).append(stage)
        self.ranks: dict[tuple[object, ...], _Rank] = {}  # keeps the last of equal ranks, which waits longest
        for own in owned.values():
            sizes = tuple([split[stage] for stage in own])
            all_of = tuple(map(sum, zip(*[counts[stage] for stage in own], strict=True)))
            ends, last = (own[0] == 0, own[-1] == len(split) - 1), own[-1]
            self.ranks[sizes, all_of, counts[last], ends] = _Rank(
                all_of,
                len(own),
                ends,
                own[0],
                begins[own[0]],
                last,
                begins[last],
                counts[last],
                sizes[0],
                min(sizes),
            )

    def chains(self, passes: Passes, whole: bool) -> list[Chain]:
        """Waits and work of each rank. whole: backward passes are not split."""
        both, found = 1 + whole, []
        for rank in self.ranks.values():
            there, back = passes.of(rank.counts, rank.ends)
            wait = 0.0
            if rank.first_stage:
                wait = passes.forward[rank.first] + passes.embedding[0]
                wait += (passes.backward[rank.first] + passes.embedding[1]) * whole
            found.append(
                Chain(
                    sum(rank.counts),
                    rank.stages,
                    rank.ends,
                    there,
                    back,
                    wait,
                    rank.first_stage * both,
                    self.hops[rank.first_stage] * both,
                    rank.first,
                    rank.first_size,
                    rank.fewest,
                )
            )
        return found

    def turns(self, passes: Passes, size: int) -> list[Turns]:
        """Turns of the ranks of an interleaved pipeline, with `size` micro-batches in the largest round."""
        found = []
        for rank in self.ranks.values():
            busy = sum(passes.of(rank.counts, rank.ends))
            last = sum(passes.of(rank.last_counts, (rank.last_stage == 0, rank.ends[1])))
            arrives, returns = (
                each[rank.last] + (rank.last_stage > 0) * end
                for each, end in ((passes.forward, passes.embedding[0]), (passes.backward, passes.embedding[1]))
            )
            count = sum(rank.counts)
            others = rank.stages - 1, count - sum(rank.last_counts), busy - last
            hops = self.hops[rank.last_stage]
            found.append(Turns(count, rank.ends, busy, arrives, returns, hops, rank.last, others, size))
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
