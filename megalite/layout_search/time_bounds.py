"""Seconds that a layout takes at least, from the times of its layers, without its schedule. Imports no torch.

All of it follows from what `schedule.clock` adds up: what a rank computes, what it waits for before and after, what the
way of a micro-batch takes, and what is exchanged beside or between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from megalite.config.parallel_schema import SCHEDULES
from megalite.config.schema import Config
from megalite.cost.layout_choice import Choice
from megalite.cost.network import Group
from megalite.cost.predict import state_seconds
from megalite.cost.schedule_tables import ROUNDS, Cost, enough
from megalite.cost.stage_time import SPLIT_OVERHEAD
from megalite.cost.stages import UNSPLIT_SCHEDULES, ZERO_BUBBLES, Timer
from megalite.layout_search.exchange_bounds import Exchanges
from megalite.layout_search.memory_bounds import SINGLE_REDUCTION_MODES, Amount, Estimate
from megalite.layout_search.pipeline_bounds import (
    Exchanged,
    Longer,
    Passes,
    Turns,
    Waits,
    Work,
    halved,
    slowest,
    slowest_waiting,
    summed,
)
from megalite.layout_search.rank_waits import Ranks
from megalite.layout_search.shape import Shape
from megalite.layout_search.turn_bounds import Pairs
from megalite.schedule.actions import Kind
from megalite.schedule.clock import Clock
from megalite.schedule.generate import NAMES, SPLIT_SCHEDULES, V_SCHEDULES
from megalite.schedule.orders import first_rounds

VIRTUAL_STAGES = (2, 3, 4, 6, 8)  # stages of a rank under interleaved_1f1b


class Least:
    """Bounds of the layouts of `config` on `gpus` GPUs. pins: keys that keep their values."""

    def __init__(
        self, config: Config, gpus: int, timer: Timer, pins: Mapping[str, Any], estimate: Estimate, offload: bool
    ) -> None:
        self.config, self.gpus, self.timer, self.pins, self.estimate = config, gpus, timer, pins, estimate
        self.model, self.offload = config.model, offload
        self._matrix = config.model.vocab_size * config.model.width
        self._all = Amount(
            *(summed(list(estimate.kinds.values()), each) for each in zip(*estimate.amounts, strict=True))
        )
        self._ranks: dict[tuple[object, ...], Ranks] = {}
        self._interleaved: dict[tuple[object, ...], list[Turns]] = {}
        self._waits: dict[tuple[object, ...], Waits] = {}
        self._longest: dict[tuple[Clock[Cost], int], tuple[list[tuple[Cost, int]], int]] = {}
        self._exchanges = Exchanges(config, timer, pins, estimate)
        both = [(1.0, 0.0), (0.0, 1.0)] if config.optim.name == "muon" else [(1.0, 0.0)]
        trains = config.adapter is None  # else factors, which are few, are left out

        def placed(states: str) -> Config:
            return replace(config, optim=replace(config.optim, placement=states))

        self._updating = {
            states: trains * min(state_seconds(*each, placed(states), gpus, timer) for each in both)
            for states in ("device", "host", config.optim.placement)
        }

    def shape(
        self, first: Choice, passes: Passes, splits: bool, alone: Passes | None = None, pairs: Pairs | None = None
    ) -> Shape:
        """The shape of a first layout. splits: whether its schedules may split backward passes. alone: passes that do
        not take turns; None: none do. pairs: as in `Shape`."""
        m, pp, hop = first.micro_batches(self.config.batch.global_), first.pp, self._hop(first)
        way = passes.split_way(1.0) if splits else passes.there + passes.back + (m - 1) * sum(passes.head[:2])
        way += 2 * (pp - 1) * hop
        alike, fullest = len(passes.kinds) == 1, -(-passes.layers // pp)  # layers of some rank
        busy = slowest(passes.layers, pp, passes.shortest, sum(passes.head[:2])) if alike else fullest * passes.shortest
        computes = max(way, m * busy, m * (passes.there + passes.back) / pp)
        states = (self._all.total + 2 * self._matrix) / pp / first.tp
        update = states / (first.replicas * first.shards * first.cp) * min(self._updating.values())
        return Shape(first, m, first.shards, passes, alone is not None, pairs, alone or passes, hop, computes, update)

    def of_sharing(self, shape: Shape, choice: Choice) -> float:
        """Seconds of the best layout whose states are shared out so."""
        pp, data, fewest = choice.pp, self._exchanges.of(choice), self._fewest()
        start = 0.0
        if choice.mode != "zero3":
            start = data.end.gathered + data.end.copied + fewest * data.least.copied
        edge = min(data.least.gathered, data.end.gathered) if choice.mode == "zero3" else 0.0
        waits = shape.passes.first_waits(pp, fewest, shape.hop + edge)
        computes = max(shape.computes, start + waits + self._exchanges.mean(shape, choice, False))
        return max(computes, self._exchanges.sent(shape, choice)) + self._update(choice, data)

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
            computes = max(computes, self._slowest(shape, choice, None))
        return max(computes, way) + shape.update

    def of_unsplit(self, shape: Shape, choice: Choice) -> float:
        """Seconds of a layout, whatever its split; all layers must be alike."""
        data = self._exchanges.of(choice)
        computes = self._slowest(shape, choice, self._exchanges.longer(shape, choice))
        start = 0.0 if choice.mode == "zero3" else data.end.gathered + data.end.copied + data.least.copied
        return max(shape.computes, start + computes) + self._update(choice, data)

    def _slowest(self, shape: Shape, choice: Choice, more: Longer | None) -> float:
        """Seconds that some rank waits and computes, whatever the split; all layers must be alike.

        more: by how much passes are longer.
        """
        passes, m, pp, whole = (
            shape.passes,
            shape.micro_batches,
            choice.pp,
            choice.schedule in UNSPLIT_SCHEDULES,
        )
        halves, found = 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES), [passes.kinds[0], passes.embedding]
        longer = [(0.0, 0.0)] * 3 if more is None else [(more.there[0], more.back[0]), more.embedding, more.head]
        each = [
            (alone[0] + add[0], alone[1] + add[1]) for alone, add in zip([*found, passes.head], longer, strict=True)
        ]
        forward, backward = each[0]
        layer, embedding, head = (there + halves * back for there, back in each)
        most = m * slowest(passes.layers, pp, layer, head)
        if choice.schedule in V_SCHEDULES:
            return most
        stages, before = choice.virtual or SCHEDULES[choice.schedule], forward + whole * backward
        return max(most, slowest_waiting(passes.layers, pp, stages, m * layer, (m * embedding, m * head), before))

    def layer(self, shape: Shape, choice: Choice) -> tuple[float, float]:
        """Seconds of a layer's forward and backward pass at least, under any split; all layers must be alike."""
        more = self._exchanges.longer(shape, choice)
        forward, backward, _ = shape.passes.kinds[0]
        return forward + more.there[0], backward + more.back[0]

    def of_layout(self, shape: Shape, choice: Choice) -> float:
        """Seconds of a layout."""
        m, data, waiting = shape.micro_batches, self._exchanges.of(choice), self._waits_of(shape, choice)
        whole, halves = choice.schedule in UNSPLIT_SCHEDULES, 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES)
        more, hop = self._exchanges.longer(shape, choice), shape.hop
        once, ends_once = self._once(shape, choice, data, whole)
        there, back = more.exceeding(waiting.all)
        if not whole:  # halves wait for the weights of their first layers
            back = summed(waiting.all.edges, more.edges) + data.end.gathered * (choice.mode == "zero3")
        most = max(waiting.back, waiting.way + 2 * waiting.hops * hop + there + back)
        for each in waiting.chains:
            (there, back), before = more.exceeding(each.work), more.exceeding(each.before)
            computes = m * (each.there + there + halves * (each.back + back))
            waits = each.wait + before[0] + before[1] * whole + each.hops * hop
            last = summed(each.before.layers, once) + summed(each.first, once) + ends_once
            if choice.schedule in ZERO_BUBBLES:
                last += each.fewest * (data.least.reduced + data.least.summed)
            most = max(most, computes + waits + last)
        for turn in self._turns(shape, choice):
            most = max(most, self._turn(turn, m, more, hop, once))
        start = self._start(shape, choice, data)
        computes = max(shape.computes, self._exchanges.mean(shape, choice, whole), start + most)
        sent = max(self._exchanges.sent(shape, choice), self._reductions(shape, choice, data, choice.schedule))
        return max(computes, sent) + self._update(choice, data, waiting)

    def _once(self, shape: Shape, choice: Choice, data: Exchanged, whole: bool) -> tuple[list[float], float]:
        """Seconds by which the last backward passes of a step are longer: of a layer of each kind, and of the ends."""
        passes, sums = shape.passes, [kind.reduced + kind.summed for kind in data.kinds]
        if not whole or choice.mode not in SINGLE_REDUCTION_MODES:
            return [0.0] * len(sums), 0.0
        reduced, added = data.end.reduced + data.end.summed, data.end.added
        ends = [passes.embedding[1], *([passes.head[1]] if len(self.estimate.split(choice)) == 1 else [])]
        known = self._exchanges.known(shape, choice)
        return [
            self._exchanges.grown(alone + kind.added, each, known or alone)
            for (_, alone, _), kind, each in zip(passes.kinds, data.kinds, sums, strict=True)
        ], sum(self._exchanges.grown(end + added, reduced) for end in ends)

    def of_schedule(self, shape: Shape, choice: Choice) -> float:
        """Seconds of a layout of several pipeline ranks, from a chain of actions in its schedule.

        The chain is the longest for the first layout that was asked for with this schedule and tp, and a long one for
        others. Gathers between its actions are left out, and sums over replicas beside backward passes. Raises
        InputError for a schedule that cannot run.
        """
        m, data = shape.micro_batches, self._exchanges.of(choice)
        alone, hop = self._stages(shape, choice, data, shape.alone), shape.hop
        turns = self._stages(shape, choice, data, shape.passes) if shape.paired else alone
        config = choice.applied(self.config, self.pins)
        few = enough(config, m)
        clock = self.timer.tables.clock(config, few)
        key = clock, choice.tp  # the more of tp, the longer are passes relative to transfers
        if key not in self._longest:
            found, hops = clock.longest([_seconds(cost, alone, turns) for cost in clock.classes], hop)
            self._longest[key] = [pair for pair in zip(clock.classes, found, strict=True) if pair[1]], hops
        chain, hops = self._longest[key]
        computes = sum(count * _seconds(cost, alone, turns) for cost, count in chain) + hops * hop
        if few < m:
            computes += (m - few) * max(self._paces(turns, choice))
        update = self._update(choice, data, self._waits_of(shape, choice))
        return self._start(shape, choice, data) + computes + update

    def _stages(self, shape: Shape, choice: Choice, data: Exchanged, passes: Passes) -> list[dict[Kind, float]]:
        """Seconds of each stage's actions, at least. passes: of the shape."""
        split, more = self.estimate.split(choice), self._exchanges.longer(shape, choice)
        of_whole = self._exchanges.longer(shape, choice, whole=True)
        ranks, begins = self._ranks_of(choice), [0, *accumulate(split)]
        reduced = [each.reduced + each.summed for each in data.kinds]
        added = [each.added for each in data.kinds]
        found, known = list[dict[Kind, float]](), dict[tuple[object, ...], dict[Kind, float]]()
        for work, (first, last) in zip(ranks.works, pairwise(begins), strict=True):
            forward, backward, weights = (
                each[last] - each[first] + work.ends[0] * passes.embedding[at] + work.ends[1] * passes.head[at]
                for at, each in enumerate((passes.forward, passes.backward, passes.weights))
            )
            key = work, round(forward, 12), round(backward, 12)
            if key not in known:
                (there, back), (_, whole) = more.exceeding(work), of_whole.exceeding(work)
                back += backward
                weights += summed(work.layers, added) + sum(work.ends) * data.end.added
                known[key] = {
                    Kind.F: forward + there,
                    Kind.B: backward + whole,
                    Kind.I: (1 + SPLIT_OVERHEAD) * (back - weights),
                    Kind.W: (1 + SPLIT_OVERHEAD) * weights,
                    Kind.REDUCE: summed(work.layers, reduced) + sum(work.ends) * (data.end.reduced + data.end.summed),
                }
            found.append(known[key])
        return found

    def _paces(self, stages: Sequence[Mapping[Kind, float]], choice: Choice) -> list[float]:
        """By rank: seconds of a micro-batch."""
        paces, halves = [0.0] * choice.pp, 1 + SPLIT_OVERHEAD * (choice.schedule in ZERO_BUBBLES)
        for seconds, rank in zip(stages, self.estimate.owners(choice), strict=True):
            paces[rank] += seconds[Kind.F] + halves * (seconds[Kind.I] + seconds[Kind.W]) / (1 + SPLIT_OVERHEAD)
        return paces

    def _reductions(self, shape: Shape, choice: Choice, data: Exchanged, schedule: str) -> float:
        """Seconds until a rank's reductions after halves of backward passes have ended, which wait for each other.

        None begins before a micro-batch has come through all stages, and replicas are summed each time.
        """
        if choice.mode in SINGLE_REDUCTION_MODES or schedule not in SPLIT_SCHEDULES:
            return 0.0
        each, _ = halved(schedule, self.estimate.split(choice), shape.micro_batches)
        reduced = data.all.reduced + data.all.summed + 2 * (data.end.reduced + data.end.summed)
        return shape.passes.there + each * reduced / choice.pp

    def _start(self, shape: Shape, choice: Choice, data: Exchanged) -> float:
        """Seconds until the first stage has the weights that it waits for."""
        if choice.mode == "zero3":
            return 0.0  # every pass waits
        (first, *others), passes = self.estimate.split(choice), shape.passes
        one, layers = not others, self._ranks_of(choice).works[0].layers
        start = data.end.gathered + (1 + one) * data.end.copied + summed(layers, [each.copied for each in data.kinds])
        if not self._exchanges.known(shape, choice):
            return start
        computes = passes.forward[first] + passes.embedding[0] + one * passes.head[0]
        gathered = (1 + one) * data.end.gathered + summed(layers, [each.gathered for each in data.kinds])
        return start + max(0.0, gathered - computes)

    def _turns(self, shape: Shape, choice: Choice) -> list[Turns]:
        """Turns of the ranks of an interleaved pipeline; of others, none."""
        key = shape, choice.schedule, choice.virtual, choice.split
        if key not in self._interleaved:
            found, m, pp = list[Turns](), shape.micro_batches, choice.pp
            if choice.schedule == "interleaved_1f1b" and pp > 1:
                few = min(m, ROUNDS * pp + m % pp)
                found = self._ranks_of(choice).turns(shape.passes, max(first_rounds(pp, few)))
            self._interleaved[key] = found
        return self._interleaved[key]

    def _turn(self, turn: Turns, m: int, more: Longer, hop: float, once: Sequence[float]) -> float:
        """Seconds of an interleaved rank. once: of a layer of each kind, by which its last backward pass is longer."""
        busy, before, others = (sum(more.exceeding(work)) for work in (turn.work, turn.before, turn.others))
        ways = turn.arrives + turn.returns + 2 * turn.hops * hop + before + summed(turn.before.layers, once)
        return ways + m * (turn.busy + busy) - turn.round * (turn.seconds + others)

    def _hop(self, first: Choice) -> float:
        """Seconds to send a micro-batch's activations to the next pipeline rank."""
        if first.pp == 1:
            return 0.0
        return self.timer.net.transfer(self.estimate.sizes(first).stream, Group(first.pp, self.gpus // first.pp))

    def _update(self, choice: Choice, data: Exchanged, waiting: Waits | None = None) -> float:
        """Seconds of the optimizer, on a rank that has its share of the model at least.

        waiting: of the layout's ranks, of which some may have more; None where the layout is still open.
        """
        whole = (self._all.whole(choice) + 2 * self._matrix) / choice.pp
        total = (self._all.total + 2 * self._matrix) / choice.pp
        if waiting is not None:
            whole, total = max(whole, waiting.whole), max(total, waiting.total)
        shards = choice.shards * choice.cp if choice.mode != "ddp" else 1
        states = (whole if choice.mode == "ddp" else total) / shards
        best = min(self._updating.values()) if waiting is None and self.offload else self._updating[choice.states]
        return (states * best + whole * data.last) / choice.tp

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
            found = ranks.chains(passes, choice.schedule in UNSPLIT_SCHEDULES, shape.pairs)
            amounts = [self._amount(each.work) for each in found]
            whole, total = max(each.whole(choice) for each in amounts), max(each.total for each in amounts)
            self._waits[key] = Waits(found, ranks.all, ranks.hops[-1], back, way, whole, total)
        return self._waits[key]

    def _amount(self, work: Work) -> Amount:
        """Parameters of the layers and ends of a rank; a tied matrix at both ends counts once."""
        own, experts = (summed(work.layers, each) for each in zip(*self.estimate.amounts, strict=True))
        return Amount(own + (any(work.ends) if self.model.tie_embeddings else sum(work.ends)) * self._matrix, experts)

    def _ranks_of(self, choice: Choice) -> Ranks:
        """The pipeline ranks of a layout."""
        key = choice.pp, choice.schedule, choice.virtual, choice.split
        if key not in self._ranks:
            estimate = self.estimate
            self._ranks[key] = Ranks(
                estimate.split(choice), estimate.owners(choice), estimate.order, len(estimate.kinds)
            )
        return self._ranks[key]


def _seconds(cost: Cost, alone: Sequence[Mapping[Kind, float]], turns: Sequence[Mapping[Kind, float]]) -> float:
    """Seconds of an action at least. A reduction beside a backward pass has none of its own.

    alone, turns: by stage, of actions that are alone and that take turns with others.
    """
    if cost.kind is Kind.REDUCE and not cost.split:
        return 0.0
    return (alone if cost.beside is None else turns)[cost.stage].get(cost.kind, 0.0)
