"""Splits with layers moved off the fullest or the slowest pipeline ranks. Imports no torch.

The default split (`plan.split.balance`) makes the slowest stage fast by FLOPs. A layout may have one of a few other
splits, where the default needs nearly all of the memory or somewhat more, or where another makes the slowest rank
faster by the predicted times of layers, embedding and head. Such a split follows from the most seconds a rank may
take for a micro-batch: of all that keep to these, it is the one whose fullest rank needs least memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from operator import add, mul
from typing import NamedTuple

from megalite.config.parallel_schema import SCHEDULES
from megalite.cost.layout_choice import Choice
from megalite.cost.stage_time import SPLIT_OVERHEAD
from megalite.cost.stages import UNSPLIT_SCHEDULES, ZERO_BUBBLES
from megalite.layout_search.memory_bounds import SINGLE_REDUCTION_MODES, Amount, Estimate
from megalite.layout_search.micro_batches_in_flight import Flights, flights
from megalite.layout_search.pipeline_bounds import ROUNDING
from megalite.layout_search.shape import Shape
from megalite.layout_search.time_bounds import Least
from megalite.schedule.generate import NAMES

MIN_LIMIT_FACTOR, MAX_LIMIT_FACTOR = 0.8, 1.3  # where layers are moved, the default split's estimate is between these
MIN_SPEEDUP = 5e-3  # by which the slowest rank must become faster for layers to be moved though all fits
MAX_SLOWDOWN = 1.25  # times as long as necessary may the slowest rank take
BLOCKS = 8  # blocks of ranks, in which it is looked whether any split may fit
MAX_LAYERS = 1 << 30  # layers: more than any model has
MAX_FITTING_SPLITS = 2  # splits of a layout that are estimated to fit, as the estimate is a little below the walk


class Held(NamedTuple):
    """Bytes that each rank holds: for a layer, and for the embedding and the head."""

    layer: list[float]
    base: list[float]

    def most(self, layers: Sequence[int]) -> float:
        """Bytes of the fullest rank with so many layers."""
        return max(map(add, map(mul, layers, self.layer), self.base))

    def rooms(self, limit: float) -> list[int]:
        """Layers with which each rank holds at most `limit` bytes."""
        return [
            int(min(MAX_LAYERS, max(0.0, limit - base) / layer))
            for layer, base in zip(self.layer, self.base, strict=True)
        ]

    def flattest(self, most: Sequence[int], fewest: Sequence[int], layers: int) -> list[int]:
        """Split `layers` among ranks, from `fewest` to `most` each, such that the fullest needs least memory."""
        found = list(most)
        ranks = [rank for rank, least in enumerate(fewest) if most[rank] > least]
        left = [(-most[rank] * self.layer[rank] - self.base[rank], rank) for rank in ranks]
        heapify(left)
        for _ in range(sum(most) - layers):
            needed, rank = left[0]
            found[rank] -= 1
            if found[rank] > fewest[rank]:
                heapreplace(left, (needed + self.layer[rank], rank))
            else:
                heappop(left)
        return found


class Ranks(NamedTuple):
    """The ranks of a pipeline.

    stages: of each. default: layers of each under the default split. fewest: that each must have, one on every stage
    but the last. ends: of the embedding and the head, how many each has. last: the last stage. owner: its rank.
    firsts: of ranks with equal `default` and `ends`, the first, which has most micro-batches in flight.
    """

    stages: list[list[int]]
    default: list[int]
    fewest: list[int]
    ends: list[int]
    last: int
    owner: int
    firsts: list[int]


def ranks_of(split: Sequence[int], owners: Sequence[int]) -> Ranks:
    """Ranks of a pipeline. owners: by stage, its rank."""
    last, owner = len(split) - 1, owners[-1]
    stages = list[list[int]]([[] for _ in range(max(owners) + 1)])
    for stage, rank in enumerate(owners):
        stages[rank].append(stage)
    default = [sum(split[stage] for stage in own) for own in stages]
    ends = [(rank == 0) + (rank == owner) for rank in range(len(stages))]
    fewest = [len(own) - (rank == owner) for rank, own in enumerate(stages)]
    firsts = {pair: rank for rank, pair in reversed([*enumerate(zip(default, ends, strict=True))])}
    return Ranks(stages, default, fewest, ends, last, owner, list(firsts.values()))


@dataclass(frozen=True)
class Load:
    """Work of pipeline ranks for a micro-batch.

    halves: seconds of backward for one second of a whole pass. layer: seconds, on average. embedding, head: seconds.
    flights: micro-batches in flight. kept: bytes that a layer keeps of one unless they are offloaded, shared by the
    stages of a rank.
    """

    ranks: Ranks
    halves: float
    layer: float
    embedding: float
    head: float
    flights: Flights
    kept: float

    @cached_property
    def outer(self) -> list[float]:
        """Seconds of a rank beside those of its layers."""
        found = [0.0] * len(self.ranks.stages)
        found[0] += self.embedding
        found[self.ranks.owner] += self.head
        return found

    @cached_property
    def ceiling(self) -> int:
        """An upper bound of the layers of a rank, on any level."""
        return int(MAX_SLOWDOWN * self.seconds(self.ranks.default) / self.layer) + 1

    @cached_property
    def quickest(self) -> list[int]:
        """The number of layers of every rank with which the slowest rank is as fast as possible."""
        layers = sum(self.ranks.default)
        mean = (layers * self.layer + sum(self.outer)) / len(
            self.ranks.stages
        )  # in which no rank has more than in the end
        found = [
            max(least, int((mean - outer) / self.layer))
            for least, outer in zip(self.ranks.fewest, self.outer, strict=True)
        ]
        if sum(found) > layers:
            found = list(self.ranks.fewest)
        after = [(each + 1) * self.layer + outer for each, outer in zip(found, self.outer, strict=True)]
        for _ in range(layers - sum(found)):
            rank = after.index(min(after))
            found[rank] += 1
            after[rank] += self.layer
        return found

    @cached_property
    def slow(self) -> bool:
        """Flag: the default split has a slower rank than necessary."""
        now, ranks = self.seconds(self.ranks.default), len(self.ranks.stages)
        fullest = -(-sum(self.ranks.default) // ranks) * self.layer  # some rank has as many layers, whatever the split
        return now > (1 + MIN_SPEEDUP) * fullest and now > (1 + MIN_SPEEDUP) * self.seconds(self.quickest)

    @cached_property
    def levels(self) -> list[list[int]]:
        """By level, the most layers each rank may have: on the first, as many as keep it within the time that the
        slowest rank needs at best; on each further level, one more."""
        slowest = self.seconds(self.quickest)
        first = [int((slowest - outer) / self.layer + ROUNDING) for outer in self.outer]
        more = 1 + int((MAX_SLOWDOWN - 1) * slowest / self.layer)
        return [list(map(max, self.ranks.fewest, [most + number for most in first])) for number in range(more)]

    def seconds(self, layers: Sequence[int]) -> float:
        """Seconds of the slowest rank with so many layers."""
        return max([number * self.layer + outer for number, outer in zip(layers, self.outer, strict=True)])

    def split(self, layers: Sequence[int]) -> tuple[int, ...]:
        """The split in which ranks have so many layers: each goes to the stage of its rank that is fastest so far, the
        last one of several."""
        found, last = [0] * (self.ranks.last + 1), self.ranks.last
        for own, number in zip(self.ranks.stages, layers, strict=True):
            if len(own) == 1:
                found[own[0]] = number
                continue
            if own[0] and own[-1] != last:
                for place, stage in enumerate(own):
                    found[stage] = (number + place) // len(own)
                continue
            after = {stage: (stage == 0) * self.embedding + (stage == last) * self.head for stage in reversed(own)}
            for stage in own:
                if stage != last:
                    found[stage], after[stage] = 1, after[stage] + self.layer
            for _ in range(number - sum(found[stage] for stage in own)):
                stage = min(after, key=after.__getitem__)
                found[stage], after[stage] = found[stage] + 1, after[stage] + self.layer
        return tuple(found)


class Moves:
    """The splits of layouts whose memory has a limit, in bytes; pinned ones have none.

    missed: times the limit that a layout may be estimated to need under the default split.
    """

    def __init__(self, estimate: Estimate, least: Least, limit: float, missed: float = MAX_LIMIT_FACTOR) -> None:
        self.estimate, self.least, self.limit, self.missed = estimate, least, limit, missed
        self._ranks: dict[tuple[object, ...], Ranks] = {}
        self._loads: dict[tuple[object, ...], Load] = {}
        self._alike = len(estimate.kinds) == 1

    def of_pipeline(self, shape: Shape, pipeline: Choice, needed: float) -> float | None:
        """Seconds of the best layout with this schedule and a moved split; None where there can be none.

        needed: bytes that the lightest of these layouts is estimated to need under the default split.
        """
        free = pipeline.pp > 1 and pipeline.split is None and pipeline.schedule in NAMES
        free = free and self.estimate.config.model.mtp is None  # else the last stage has layers that cannot move
        if not free or needed > self.missed * self.limit:
            return None
        load = self._load(shape, pipeline)
        if not self._may_fit(load, pipeline):
            return None
        return self.least.of_any_split(shape, pipeline)

    def wanted(
        self, shape: Shape, pipeline: Choice, layouts: Iterable[tuple[float, Choice]]
    ) -> Iterator[tuple[float, Choice]]:
        """Yield the layouts of a pipeline whose layers are moved, with bounds."""
        load, known = self._load(shape, pipeline), dict[tuple[float, bool], bool]()
        chunks, default, ends = load.flights.most, load.ranks.default, load.ranks.ends
        ranks = [  # under the default split: bytes of activations, and numbers of layers and of matrices at the ends
            (default[rank] * chunks[rank] * load.kept, default[rank], self._matrices(ends[rank]))
            for rank in load.ranks.firsts
        ]
        for bound, layout in layouts:
            key = of_layer, offloads = self._of_layer(load, layout), layout.offload_activations
            if key not in known:
                end = self._bytes(load, layout, Amount(self.estimate.matrix, 0))
                needed = max([kept * (not offloads) + of_layer * own + end * ends for kept, own, ends in ranks])
                near = needed > MIN_LIMIT_FACTOR * self.limit or load.slow
                known[key] = near and needed <= self.missed * self.limit and self._may_fit(load, layout)
            if known[key]:
                yield max(bound, self.least.of_unsplit(shape, layout)) if self._alike else bound, layout

    def _may_fit(self, load: Load, choice: Choice) -> bool:
        """Return whether there may be a split that fits; no layout whose ranks share more states has one otherwise.

        Layers of each kind are placed as if there were no others.
        """
        kept, stages = self.estimate.kept(choice), len(load.ranks.stages[0])
        return all(
            self._may_hold(
                load, self._bytes(load, choice, amount), 0.0 if choice.offload_activations else each / stages, layers
            )
            for amount, each, layers in zip(self.estimate.amounts, kept, self.estimate.kinds.values(), strict=True)
        )

    def _may_hold(self, load: Load, layer: float, kept: float, layers: int) -> bool:
        """Return whether so many layers may fit. layer: bytes for the parameters of each; kept: for activations."""
        chunks = load.flights.most
        limit, ranks = self.limit, len(chunks)
        if (layer + chunks[0] * kept) * -(-layers // ranks) <= limit:  # the first rank holds most
            return True
        if (layer + chunks[-1] * kept) * layers > limit * ranks:
            return False
        step, total = -(-ranks // BLOCKS), 0
        for begin in range(0, ranks, step):  # all of a block as its last rank, which holds least
            block = chunks[begin : begin + step]
            total += len(block) * min(load.ceiling, int(min(MAX_LAYERS, limit / (layer + block[-1] * kept))))
        return total >= layers

    def splits(self, shape: Shape, layout: Choice) -> Iterator[tuple[float, tuple[int, ...]]]:
        """The splits of a layout, each with a lower bound of its seconds."""
        load = self._load(shape, layout)
        held, fitting, known = self._held(layout, load), 0, {tuple(load.ranks.default)}
        rooms, layers = held.rooms(self.limit), shape.passes.layers
        layer, whole = self._layer(shape, layout), layout.schedule in UNSPLIT_SCHEDULES
        for most in load.levels:
            if sum(map(min, most, rooms)) < layers:
                continue
            ranks = tuple(held.flattest(most, load.ranks.fewest, layers))
            if ranks in known:
                continue
            known.add(ranks)
            split = load.split(ranks)
            yield self._bound(shape.micro_batches, layer, whole, load, ranks, split), split
            fitting += 1
            if fitting == MAX_FITTING_SPLITS:
                break

    def _layer(self, shape: Shape, layout: Choice) -> tuple[float, float]:
        """Seconds of a layer's forward and backward pass at least; none where layers differ."""
        return self.least.layer(shape, layout) if self._alike else (0.0, 0.0)

    def _bound(
        self,
        m: int,
        layer: tuple[float, float],
        whole: bool,
        load: Load,
        ranks: Sequence[int],
        split: Sequence[int],
    ) -> float:
        """Seconds in which ranks wait for the first of `m` micro-batches and compute all.

        layer: seconds of both passes. whole: whether backward passes are. ranks: layers of each.
        """
        both, before = layer[0] + load.halves * layer[1], layer[0] + whole * layer[1]
        most = waits = 0.0
        for number, outer, first in zip(ranks, load.outer, split, strict=False):  # stage r is the first of rank r
            most = max(most, waits + m * (number * both + outer))
            waits += first * before
        return most

    def _load(self, shape: Shape, choice: Choice) -> Load:
        """Work of the ranks of a layout."""
        key = shape, choice.schedule, choice.virtual
        if key not in self._loads:
            passes, halves = shape.passes, 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES)
            ranks, virtual = self._ranks_of(choice), choice.virtual or SCHEDULES[choice.schedule]
            self._loads[key] = Load(
                ranks,
                halves,
                (passes.forward[-1] + halves * passes.backward[-1]) / passes.layers,
                passes.embedding[0] + halves * passes.embedding[1],
                passes.head[0] + halves * passes.head[1],
                flights(choice.schedule, choice.pp, shape.micro_batches, virtual),
                min(self.estimate.kept(choice)) / len(ranks.stages[0]),
            )
        return self._loads[key]

    def _ranks_of(self, choice: Choice) -> Ranks:
        key = choice.pp, choice.schedule, choice.virtual
        if key not in self._ranks:
            self._ranks[key] = ranks_of(self.estimate.split(choice), self.estimate.owners(choice))
        return self._ranks[key]

    def _of_layer(self, load: Load, choice: Choice) -> float:
        """Bytes for the parameters of the smallest layer of a rank."""
        return min(self._bytes(load, choice, amount) for amount in self.estimate.amounts)

    def _bytes(self, load: Load, choice: Choice, amount: Amount) -> float:
        """Bytes for so many parameters of a rank."""
        states, gathered, whole, reduced = self.estimate.held(choice, amount)
        if not load.flights.beside:
            return states + gathered
        return states + gathered + (whole if choice.mode in SINGLE_REDUCTION_MODES else reduced)

    def _matrices(self, ends: int) -> int:
        """Matrices of the embedding and the head on a rank that has so many of these."""
        return min(1, ends) if self.estimate.config.model.tie_embeddings else ends

    def _held(self, choice: Choice, load: Load) -> Held:
        """Bytes that the ranks of a layout hold."""
        layer, kept = self._of_layer(load, choice), 0.0 if choice.offload_activations else load.kept
        end = self._bytes(load, choice, Amount(self.estimate.matrix, 0))
        return Held(
            [layer + number * kept for number in load.flights.most],
            [end * self._matrices(ends) for ends in load.ranks.ends],
        )
