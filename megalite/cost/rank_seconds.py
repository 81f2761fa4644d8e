"""Seconds in which pipeline ranks compute, by their actions. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megalite.cost.layer import Seconds
from megalite.cost.schedule_tables import Cost, enough
from megalite.cost.stage_time import StageTime
from megalite.cost.stages import UNSPLIT_SCHEDULES, ZERO_BUBBLES, Timer
from megalite.plan.pipeline import pairs_up
from megalite.plan.resolved import Plan
from megalite.schedule.actions import Kind, Table
from megalite.schedule.generate import NAMES


def table_of_step(plan: Plan, timer: Timer, m: int) -> Table:
    """The schedule of a step of `m` micro-batches; of a named one, only what ranks compute, gather and reduce."""
    named = plan.config.parallel.pipeline.schedule in NAMES
    return timer.tables.of(plan.config, m) if named else plan.table(m)


def seconds_of(cost: Cost, stages: Sequence[StageTime]) -> float:
    """Seconds that an action takes. Passes in turns have the shares in the time of both that they would have alone."""
    stage = stages[cost.stage]
    if cost.beside is not None:
        first, second = (stage, stages[cost.beside]) if cost.kind is Kind.F else (stages[cost.beside], stage)
        forward, backward = first.forward.total, second.backward.total
        of_first = forward / (forward + backward) * first.beside(second).total
        both = first.beside(second, cost.reduces, cost.last).total
        return of_first if cost.kind is Kind.F else both - of_first
    match cost.kind:
        case Kind.F:
            return stage.forward.total
        case Kind.B:
            return stage.backward.total + (stage.longer[cost.last] if cost.reduces else 0.0)
        case Kind.I:
            return stage.halves[0]
        case Kind.W:
            return stage.halves[1]
        case Kind.GATHER:
            return stage.gather
        case Kind.REDUCE:
            return stage.reducing(cost.last) if cost.split else 0.0  # else it is in the backward pass
    return 0.0


def pace_of(plan: Plan, stages: Sequence[StageTime]) -> float:
    """Seconds that another micro-batch adds at least to a long step: a rank's passes, or its reductions, if they take
    longer and pile up."""
    schedule, mode = plan.config.parallel.pipeline.schedule, plan.config.parallel.data_mode
    whole = schedule in UNSPLIT_SCHEDULES
    most, paired = 0.0, pairs_up(plan.config)
    for rank in range(plan.config.parallel.pp):
        mine = [stages[stage] for stage in plan.stages_of(rank)]
        if paired:
            one, other = mine
            most = max(most, one.beside(other).total + other.beside(one).total)
            continue
        back = (sum(stage.halves) if schedule in ZERO_BUBBLES else stage.backward.total for stage in mine)
        computes = sum(stage.forward.total for stage in mine) + sum(back)
        reduces = 0.0
        if mode in ("zero2", "zero3"):
            computes += whole * sum(stage.longer[False] for stage in mine)
            reduces = (schedule in ZERO_BUBBLES) * sum(stage.reduce for stage in mine)
        most = max(most, computes, reduces)
    return most


class Counts(NamedTuple):
    """Passes of a step: by stage, backward passes that are split; by stages of the forward and of the backward pass,
    those that take turns."""

    split: Mapping[int, float]
    pairs: Mapping[tuple[int, int], float]


def passes_of(plan: Plan, timer: Timer, m: int) -> Counts:
    """Passes of a step of `m` micro-batches, but for those that are whole and alone."""
    config = plan.config
    few, pp = enough(config, m), config.parallel.pp

    def counted(m: int) -> tuple[Counter[int], Counter[tuple[int, int]]]:
        table = table_of_step(plan, timer, m)
        halves = Counter(action.stage for order in table.orders for action in order if action.kind is Kind.I)
        return halves, Counter((first.stage, second.stage) for first, second in table.pairs.items())

    if not table_of_step(plan, timer, few).splits_backward:
        return Counts({}, {})
    (halves, pairs), more = counted(few), (m - few) / pp
    fewer_halves, fewer_pairs = counted(few - pp) if few < m else (halves, pairs)
    return Counts(
        {stage: found + more * (found - fewer_halves[stage]) for stage, found in halves.items()},
        {stages: found + more * (found - fewer_pairs[stages]) for stages, found in pairs.items()},
    )


def busy_of(plan: Plan, stages: list[StageTime], counts: Counts, rank: int, m: int) -> Seconds:
    """The time in which a rank computes in a step of `m` micro-batches, slowed by reductions beside it.

    Reductions run beside whole passes.
    """
    found = Seconds()
    each_time = plan.config.parallel.data_mode in ("zero2", "zero3")
    for stage in plan.stages_of(rank):
        time = stages[stage]
        longer = sum(time.halves) / time.backward.total - 1
        found += (time.forward + time.backward) * m + time.backward * (longer * counts.split.get(stage, 0.0))
        if not counts.split:
            found += Seconds(data=time.longer[True] + (m - 1) * time.longer[False] * each_time)
        for other in plan.stages_of(rank):
            if pairs := counts.pairs.get((stage, other)):
                found += time.saved_beside(stages[other]) * -pairs
    return found
