"""Seconds that a layout takes at least, from the times of its layers, without its schedule. Imports no torch.

All of it follows from what `schedule.clock` adds up: what a rank computes, what it waits for before and after, what the
way of a micro-batch takes, and what is exchanged beside or between them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, get_args

from megalite.config.schema import SCHEDULES, Config, Place
from megalite.cost.layout_choice import Choice
from megalite.cost.network import Group
from megalite.cost.predict import state_seconds
from megalite.cost.schedule_tables import ROUNDS, Cost, enough
from megalite.cost.stages import SPLIT_OVERHEAD, UNSPLIT_SCHEDULES, ZERO_BUBBLES, Shared, Timer
from megalite.layout_search.memory_bounds import SINGLE_REDUCTION_MODES, Estimate, mixed
from megalite.layout_search.pipeline_bounds import (
    NO_EXTENSION,
    Exchanged,
    Longer,
    Moved,
    Passes,
    Turns,
    Waits,
    halved,
    slowest,
    slowest_waiting,
)
from megalite.layout_search.rank_waits import Ranks
from megalite.schedule.actions import Kind
from megalite.schedule.clock import Clock
from megalite.schedule.generate import NAMES, SPLIT_SCHEDULES, V_SCHEDULES
from megalite.schedule.orders import first_rounds

VIRTUAL_STAGES = (2, 3, 4, 6, 8)  # stages of a rank under interleaved_1f1b
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True, eq=False)  # which makes it a quick key
class Shape:
    """Layouts that share everything that decides the time of layers.

    hop: seconds to send a micro-batch's activations to the next pipeline rank. computes: seconds until the last
    backward pass of a step has ended, at least. update: those of the optimizer in the best of the layouts.
    """

    choice: Choice  # choice of its first layout
    micro_batches: int
    dp: int
    passes: Passes
    hop: float
    computes: float
    update: float

    @property
    def bound(self) -> float:
        """Seconds of the whole step at least."""
        return self.computes + self.update


class Least:
    """Bounds of the layouts of `config` on `gpus` GPUs. pins: keys that keep their values."""

    def __init__(
        self, config: Config, gpus: int, timer: Timer, pins: Mapping[str, Any], estimate: Estimate, offload: bool
    ) -> None:
        self.config, self.gpus, self.timer, self.pins, self.estimate = config, gpus, timer, pins, estimate
        self.model, self.offload = config.model, offload
        self._matrix = config.model.vocab_size * config.model.width
        self._smallest = min(amount.total for amount in estimate.amounts)
        self._ranks: dict[tuple[object, ...], Ranks] = {}
        self._interleaved: dict[tuple[object, ...], list[Turns]] = {}
        self._waits: dict[tuple[object, ...], Waits] = {}
        self._longest: dict[tuple[Clock[Cost], int], tuple[list[tuple[Cost, int]], int]] = {}
        self._exchanged: dict[tuple[object, ...], Exchanged] = {}
        self._sent_seconds: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}
        self._longer_passes: dict[tuple[object, ...], Longer] = {}
        both = [(1.0, 0.0), (0.0, 1.0)] if config.optim.name == "muon" else [(1.0, 0.0)]
        self._updating = {place: min(state_seconds(*each, place, timer) for each in both) for place in PLACES}

    def shape(self, first: Choice, passes: Passes, splits: bool) -> Shape:
        """The shape of a first layout. splits: whether its schedules may split backward passes."""
        m, pp, hop = first.micro_batches(self.config.batch.global_), first.pp, self._hop(first)
        way = passes.split_way(1.0) if splits else passes.there + passes.back + (m - 1) * sum(passes.head[:2])
        way += 2 * (pp - 1) * hop
        alike, fullest = len(passes.kinds) == 1, -(-passes.layers // pp)  # layers of some rank
        busy = slowest(passes.layers, pp, passes.shortest, sum(passes.head[:2])) if alike else fullest * passes.shortest
        computes = max(way, m * busy, m * (passes.there + passes.back) / pp)
        held = self._share_of_model(passes.layers, pp, self._smallest) / first.tp
        update = held / (first.replicas * first.shards * first.cp) * min(self._updating.values())
        return Shape(first, m, first.shards, passes, hop, computes, update)

    def of_sharing(self, shape: Shape, choice: Choice) -> float:
        """Seconds of the best layout whose states are shared out so."""
        pp, data, fewest = choice.pp, self._exchanges(choice), self._fewest()
        start = 0.0
        if choice.mode != "zero3":
            start = data.end.gathered + data.end.copied + fewest * data.least.copied
        edge = min(data.least.gathered, data.end.gathered) if choice.mode == "zero3" else 0.0
        waits = shape.passes.first_waits(pp, fewest, shape.hop + edge)
        computes = max(shape.computes, start + waits + self._mean(shape, choice, data, False))
        return max(computes, self._sent(shape, choice, data)) + self._update(shape, choice, data, 0)

    def of_pipeline(self, shape: Shape, choice: Choice) -> float:
        """Seconds of the best layout with this schedule."""
        m, waiting, hop = shape.micro_batches, self._waits_of(shape, choice), shape.hop
        halves = 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES)
        most = max(waiting.back, waiting.way + 2 * waiting.hops * hop)
        for each in waiting.chains:
            most = max(most, m * (each.there + halves * each.back) + each.wait + each.hops * hop)
        return max(shape.computes, most) + shape.update

    def of_any_split(self, shape: Shape, choice: Choice) -> float:
        """Seconds of the best layout with this schedule, whatever its split. choice: with the default one."""
        passes, halves, computes = shape.passes, choice.schedule in ZERO_BUBBLES, shape.computes
        way = passes.split_way(1 + SPLIT_OVERHEAD * halves)
        if choice.schedule in UNSPLIT_SCHEDULES:
            way = passes.there + passes.back + (shape.micro_batches - 1) * sum(passes.head[:2])
        way += 2 * self._ranks_of(choice).hops[-1] * shape.hop
        if len(passes.kinds) == 1:
            computes = max(computes, self._slowest(shape, choice, NO_EXTENSION))
        return max(computes, way) + shape.update

    def of_unsplit(self, shape: Shape, choice: Choice) -> float:
        """Seconds of a layout, whatever its split; all layers must be alike."""
        data = self._exchanges(choice)
        computes = self._slowest(shape, choice, self._longer(shape, choice, data))
        start = 0.0 if choice.mode == "zero3" else data.end.gathered + data.end.copied + data.least.copied
        return max(shape.computes, start + computes) + self._update(shape, choice, data, 0)

    def _slowest(self, shape: Shape, choice: Choice, more: Longer) -> float:
        """Seconds that some rank waits and computes, whatever the split. more: by how much passes are longer."""
        passes, m, pp, whole = shape.passes, shape.micro_batches, choice.pp, choice.schedule in UNSPLIT_SCHEDULES
        halves, (forward, backward, _) = 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES), passes.kinds[0]
        forward, backward = forward + more.layer[0], backward + more.layer[1]
        layer, embedding, head = (
            forward + halves * backward,
            *(
                each[0] + longer[0] + halves * (each[1] + longer[1])
                for each, longer in ((passes.embedding, more.embedding), (passes.head, more.head))
            ),
        )
        found = m * slowest(passes.layers, pp, layer, head)
        if choice.schedule in V_SCHEDULES:
            return found
        stages, before = choice.virtual or SCHEDULES[choice.schedule], forward + whole * backward
        return max(found, slowest_waiting(passes.layers, pp, stages, m * layer, (m * embedding, m * head), before))

    def layer(self, shape: Shape, choice: Choice) -> tuple[float, float]:
        """Seconds of a layer's forward and backward pass at least, under any split; all layers must be alike."""
        more = self._longer(shape, choice, self._exchanges(choice))
        forward, backward, _ = shape.passes.kinds[0]
        return forward + more.layer[0], backward + more.layer[1]

    def of_layout(self, shape: Shape, choice: Choice) -> float:
        """Seconds of a layout."""
        m, data, passes = shape.micro_batches, self._exchanges(choice), shape.passes
        split = self.estimate.split(choice)
        whole, halves = choice.schedule in UNSPLIT_SCHEDULES, 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES)
        waiting = self._waits_of(shape, choice)
        found = waiting.chains
        more, hop = self._longer(shape, choice, data), shape.hop
        both, summed = more.layer[0] + more.layer[1] * whole, data.least.reduced + data.least.summed
        once = ends_once = 0.0
        if whole and choice.mode in SINGLE_REDUCTION_MODES:  # the last backward passes are longer
            once = self._grown(passes.most[1] + data.most.added, summed, self._least_of(shape, choice)[1])
            reduced, added = data.end.reduced + data.end.summed, data.end.added
            ends = [passes.embedding[1], *([passes.head[1]] if len(split) == 1 else [])]
            ends_once = sum(self._grown(end + added, reduced) for end in ends)
        most = self._way(waiting, len(split), more, hop)
        for each in found:
            there, back = more.exceeding(each.layers, each.ends)
            computes = m * (each.there + there + halves * (each.back + back) + (1 + halves) * each.stages * more.stage)
            waits = each.wait + each.layers_before * both + each.before * more.stage + each.hops * hop
            last = (
                (each.layers_before + each.first) * once
                + ends_once
                + (choice.schedule in ZERO_BUBBLES) * each.fewest * summed
            )
            most = max(most, computes + waits + last)
        for turn in self._turns(shape, choice) if choice.mode in SINGLE_REDUCTION_MODES else ():
            most = max(most, self._turn(turn, m, data, hop, once))
        start = self._start(shape, choice, data, split[0])
        computes = max(shape.computes, self._mean(shape, choice, data, whole), start + most)
        sent = max(self._sent(shape, choice, data), self._reductions(shape, choice, data, choice.schedule))
        return max(computes, sent) + self._update(shape, choice, data, max(each.layers for each in found))

    def of_schedule(self, shape: Shape, choice: Choice) -> float:
        """Seconds of a layout of several pipeline ranks, from a chain of actions in its schedule.

        The chain is the longest for the first layout that was asked for with this schedule and tp, and a long one for
        others. Gathers between its actions are left out, and sums over replicas beside backward passes. Raises
        InputError for a schedule that cannot run.
        """
        m, data = shape.micro_batches, self._exchanges(choice)
        stages, hop = self._stages(shape, choice, data), shape.hop
        config = choice.applied(self.config, self.pins)
        few = enough(config, m)
        clock = self.timer.tables.clock(config, few)
        key = clock, choice.tp  # the more of tp, the longer are passes relative to transfers
        if key not in self._longest:
            found, hops = clock.longest([_seconds(cost, stages) for cost in clock.classes], hop)
            self._longest[key] = [pair for pair in zip(clock.classes, found, strict=True) if pair[1]], hops
        chain, hops = self._longest[key]
        computes = sum(count * _seconds(cost, stages) for cost, count in chain) + hops * hop
        if few < m:
            computes += (m - few) * max(self._paces(stages, choice))
        first = self.estimate.split(choice)[0]
        fullest = max(each.layers for each in self._waits_of(shape, choice).chains)
        return self._start(shape, choice, data, first) + computes + self._update(shape, choice, data, fullest)

    def _stages(self, shape: Shape, choice: Choice, data: Exchanged) -> list[dict[Kind, float]]:
        """Seconds of each stage's actions, at least."""
        split, passes, more = self.estimate.split(choice), shape.passes, self._longer(shape, choice, data)
        of_whole = self._longer(shape, choice, data, whole=True)
        found, known = list[dict[Kind, float]](), dict[tuple[object, ...], dict[Kind, float]]()
        for stage, (first, last) in enumerate(pairwise([0, *accumulate(split)])):
            has = stage == 0, stage == len(split) - 1
            forward, backward, weights = (
                each[last] - each[first] + has[0] * passes.embedding[at] + has[1] * passes.head[at]
                for at, each in enumerate((passes.forward, passes.backward, passes.weights))
            )
            key = last - first, has, round(forward, 12), round(backward, 12)
            if key not in known:
                (there, back), (_, whole) = (each.exceeding(last - first, has) for each in (more, of_whole))
                back += backward + more.stage
                weights += (last - first) * data.least.added + sum(has) * data.end.added
                known[key] = {
                    Kind.F: forward + there + more.stage,
                    Kind.B: backward + whole + more.stage,
                    Kind.I: (1 + SPLIT_OVERHEAD) * (back - weights),
                    Kind.W: (1 + SPLIT_OVERHEAD) * weights,
                    Kind.REDUCE: (last - first) * (data.least.reduced + data.least.summed)
                    + sum(has) * (data.end.reduced + data.end.summed),
                }
            found.append(known[key])
        return found

    def _paces(self, stages: Sequence[Mapping[Kind, float]], choice: Choice) -> list[float]:
        """By rank: seconds of a micro-batch."""
        paces, halves = [0.0] * choice.pp, 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES)
        for seconds, rank in zip(stages, self.estimate.owners(choice), strict=True):
            paces[rank] += seconds[Kind.F] + halves * (seconds[Kind.I] + seconds[Kind.W]) / (1 + SPLIT_OVERHEAD)
        return paces

    def _mean(self, shape: Shape, choice: Choice, data: Exchanged, whole: bool) -> float:
        """Seconds in which a rank computes, on average. whole: backward passes are not split."""
        forward, backward = shape.passes.there, shape.passes.back
        copied, added = data.all.copied + 2 * data.end.copied, data.all.added + 2 * data.end.added
        gathered, constants, zero3 = (
            data.all.gathered + 2 * data.end.gathered,
            self.timer.constants,
            choice.mode == "zero3",
        )
        reduced = (data.all.reduced + 2 * data.end.reduced) * (whole and choice.mode not in SINGLE_REDUCTION_MODES)
        forward = constants.beside(forward + zero3 * copied, zero3 * gathered)
        backward = constants.beside(backward + zero3 * copied + added, zero3 * gathered + reduced)
        return shape.micro_batches * (forward + backward) / choice.pp

    def _sent(self, shape: Shape, choice: Choice, data: Exchanged) -> float:
        """Seconds for which the wires of data parallelism are busy with each micro-batch, on an average rank."""
        if choice.mode in SINGLE_REDUCTION_MODES:
            return 0.0
        gathered = 2 * (data.all.gathered + 2 * data.end.gathered) * (choice.mode == "zero3")
        return shape.micro_batches * (gathered + data.all.reduced + 2 * data.end.reduced) / choice.pp

    def _longer(self, shape: Shape, choice: Choice, data: Exchanged, whole: bool | None = None) -> Longer:
        """Seconds that copies, gathers and reductions of each micro-batch add to passes.

        whole: whether backward passes are; None: as all are under the schedule.
        """
        whole = choice.schedule in UNSPLIT_SCHEDULES if whole is None else whole
        key = shape, choice.mode, choice.replicas, whole, choice.offload_activations
        if (known := self._longer_passes.get(key)) is not None:
            return known
        passes, zero3 = shape.passes, choice.mode == "zero3"
        reduces = choice.mode not in SINGLE_REDUCTION_MODES and whole

        def longer(alone: Sequence[float], moved: Moved, least: Sequence[float | None]) -> tuple[float, float]:
            copied, gathered = zero3 * moved.copied, zero3 * moved.gathered
            back = copied + moved.added
            return (
                copied + self._grown(alone[0] + copied, gathered, least[0]),
                back + self._grown(alone[1] + back, gathered + reduces * moved.reduced, least[1]),
            )

        found = self._longer_passes[key] = Longer(
            longer(passes.most, data.least, self._least_of(shape, choice)),
            longer(passes.embedding, data.end, (None, None)),
            longer(passes.head, data.end, (None, None)),
            min(data.least.gathered, data.end.gathered) if zero3 else 0.0,
        )
        return found

    def _least_of(self, shape: Shape, choice: Choice) -> tuple[float | None, float | None]:
        """Seconds of a layer's passes at least, where nothing is known of how long they take at most."""
        return (None, None) if self._known(choice) else shape.passes.least

    def _grown(self, alone: float, sent: float, least: float | None = None) -> float:
        """Seconds by which a pass is longer for communication beside it, at least.

        alone: what it takes at most without; least: if that is not known, what it takes at least.
        """
        if least is None:
            return self.timer.constants.beside(alone, sent) - alone
        return self.timer.constants.overlap * min(least, sent)

    def _known(self, choice: Choice) -> bool:
        """Return whether passes of layers take as long as `Shape.passes` says, rather than longer."""
        return not choice.offload_activations and not mixed(self.config, self.pins, choice)

    def _reductions(self, shape: Shape, choice: Choice, data: Exchanged, schedule: str) -> float:
        """Seconds until a rank's reductions after halves of backward passes have ended, which wait for each other.

        None begins before a micro-batch has come through all stages, and replicas are summed each time.
        """
        if choice.mode in SINGLE_REDUCTION_MODES or schedule not in SPLIT_SCHEDULES:
            return 0.0
        each, _ = halved(schedule, self.estimate.split(choice), shape.micro_batches)
        reduced = data.all.reduced + data.all.summed + 2 * (data.end.reduced + data.end.summed)
        return shape.passes.there + each * reduced / choice.pp

    def _start(self, shape: Shape, choice: Choice, data: Exchanged, first: int) -> float:
        """Seconds until the first stage, of `first` layers, has the weights that it waits for."""
        if choice.mode == "zero3":
            return 0.0  # every pass waits
        one, passes = len(self.estimate.split(choice)) == 1, shape.passes
        start = data.end.gathered + (1 + one) * data.end.copied + first * data.least.copied
        if not self._known(choice):
            return start
        computes = passes.forward[first] + passes.embedding[0] + one * passes.head[0]
        return start + max(0.0, (1 + one) * data.end.gathered + first * data.least.gathered - computes)

    def _way(self, waits: Waits, stages: int, more: Longer, hop: float) -> float:
        """Seconds of a micro-batch on its way through all stages and back; or with others before or after it."""
        return max(waits.back, waits.way + 2 * (waits.hops * hop + stages * more.stage))

    def _turns(self, shape: Shape, choice: Choice) -> list[Turns]:
        """Turns of the ranks of an interleaved pipeline."""
        key = shape, choice.schedule, choice.virtual, choice.split
        if key not in self._interleaved:
            found, m, pp = list[Turns](), shape.micro_batches, choice.pp
            if choice.schedule == "interleaved_1f1b" and pp > 1:
                few = min(m, ROUNDS * pp + m % pp)
                found = self._ranks_of(choice).turns(shape.passes, max(first_rounds(pp, few)))
            self._interleaved[key] = found
        return self._interleaved[key]

    def _turn(self, turn: Turns, m: int, data: Exchanged, hop: float, once: float) -> float:
        """Seconds of an interleaved rank, where gradients are reduced once a step. once: of a layer, beside that."""
        stages, layers, seconds = turn.others
        busy = turn.busy + turn.layers * data.least.added + sum(turn.ends) * data.end.added
        less = seconds + layers * data.most.added + min(stages, sum(turn.ends)) * data.end.added
        ways = turn.arrives + turn.returns + 2 * turn.hops * hop + turn.before * (data.least.added + once)
        return ways + m * busy - turn.round * less

    def _hop(self, first: Choice) -> float:
        """Seconds to send a micro-batch's activations to the next pipeline rank."""
        if first.pp == 1:
            return 0.0
        return self.timer.net.transfer(self.estimate.sizes(first).stream, Group(first.pp, self.gpus // first.pp))

    def _update(self, shape: Shape, choice: Choice, data: Exchanged, layers: int) -> float:
        """Seconds of the optimizer, on a rank that has its share of the model and at least so many layers.

        layers: 0 where the layout is still open.
        """
        whole = min(amount.whole(choice) for amount in self.estimate.amounts)
        held, states = (
            max(layers * smallest, self._share_of_model(shape.passes.layers, choice.pp, smallest)) / choice.tp
            for smallest in (whole, whole if choice.mode == "ddp" else self._smallest)
        )
        shards = choice.shards * choice.cp if choice.mode != "ddp" else 1
        best = min(self._updating.values()) if layers == 0 and self.offload else self._updating[choice.states]
        return states / shards * best + held * data.last

    def _share_of_model(self, layers: int, pp: int, smallest: float) -> float:
        """Parameters that some pipeline rank has at least, if each of its layers has at least so many."""
        return (layers * smallest + 2 * self._matrix) / pp

    def _fewest(self) -> int:
        """Layers that each stage has at least but the last, under any schedule."""
        if (split := self.config.parallel.pipeline.split) and "parallel.pipeline.split" in self.pins:
            return min(split[:-1], default=0)
        return int(self.pins.get("parallel.pipeline.schedule", NAMES[0]) in NAMES)

    def _waits_of(self, shape: Shape, choice: Choice) -> Waits:
        """Waits and work of pipeline ranks."""
        key = shape, choice.schedule, choice.virtual, choice.split
        if key not in self._waits:
            ranks, m, passes = self._ranks_of(choice), shape.micro_batches, shape.passes
            back = way = 0.0
            if choice.schedule in UNSPLIT_SCHEDULES:
                way = passes.there + passes.back + (m - 1) * sum(passes.head[:2])
            elif choice.schedule in SPLIT_SCHEDULES:
                longer = 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES)
                shortest = ranks.shortest(passes) if choice.schedule in V_SCHEDULES else (0.0, 0.0, 0.0)
                back = passes.split_back(choice.schedule, m, ranks.split, longer, shortest)
                way = passes.split_way(longer)
            found = ranks.chains(passes, choice.schedule in UNSPLIT_SCHEDULES)
            self._waits[key] = Waits(found, ranks.hops[-1], back, way)
        return self._waits[key]

    def _ranks_of(self, choice: Choice) -> Ranks:
        """The pipeline ranks of a layout."""
        key = choice.pp, choice.schedule, choice.virtual, choice.split
        if key not in self._ranks:
            estimate = self.estimate
            self._ranks[key] = Ranks(
                estimate.split(choice), estimate.owners(choice), estimate.order, len(estimate.kinds)
            )
        return self._ranks[key]

    def _exchanges(self, choice: Choice) -> Exchanged:
        """Seconds to exchange weights and gradients of a micro-batch."""
        key = choice.tp, choice.ep, choice.cp, choice.replicas, choice.shards, choice.mode, choice.micro
        if key not in self._exchanged:
            shared, passes = Shared(choice.applied(self.config, self.pins), self.timer.net), self.timer.kernels.passes
            if key[:-1] not in self._sent_seconds:
                self._sent_seconds[key[:-1]] = [*map(shared.seconds, self.estimate.kinds), shared.seconds("embedding")]
            sizes = *(amount.whole(choice) for amount in self.estimate.amounts), self._matrix
            *layers, end = (
                Moved(*sent, passes(shared.copied * (size / choice.tp)), passes(shared.added * (size / choice.tp)))
                for sent, size in zip(self._sent_seconds[key[:-1]], sizes, strict=True)
            )
            counts = list(self.estimate.kinds.values())

            def joined(join: Callable[[Iterable[float]], float]) -> Moved:
                return Moved(*(join(each) for each in zip(*layers, strict=True)))

            self._exchanged[key] = Exchanged(
                joined(min),
                joined(max),
                end,
                joined(lambda each: sum(count * seconds for count, seconds in zip(counts, each, strict=True))),
                passes(shared.last),
            )
        return self._exchanged[key]


def _seconds(cost: Cost, stages: Sequence[Mapping[Kind, float]]) -> float:
    """Seconds of an action at least. A reduction beside a backward pass has none of its own."""
    return 0.0 if cost.kind is Kind.REDUCE and not cost.split else stages[cost.stage].get(cost.kind, 0.0)
