"""What a search for an order of a pipeline is given, and the time of a step under an order. Imports no torch.

Both have the times by which `predict` tells a step: those of stages on this cluster, halves of a backward pass that
take longer than the whole, transfers, and weights and gradients that are exchanged beside compute.
"""

from megalite.plan.automatic import costs_of as sizes_of
from megalite.plan.pipeline import sharded, sharding_mode
from megalite.plan.resolved import Plan
from megalite.planner.predict import Trial, seconds_of, transfer_seconds
from megalite.planner.stages import SPLIT, StageTime, Timer
from megalite.planner.tables import costs_of
from megalite.schedule.actions import Table
from megalite.schedule.clock import clock_of
from megalite.schedule.problem import Beside, Problem, StageCosts


def problem_of(plan: Plan, m: int, limits: tuple[float, ...], timer: Timer) -> Problem:
    """What is to be ordered: `plan`'s stages in a step of `m` micro-batches, in seconds and bytes.

    limits: bytes of activations by rank. With `train.recompute: budget`, modes of layers are those of the plan, though
    another order may lead to others.
    """
    config, times = plan.config, timer.stages(plan)
    stages = [_costs(time, size) for time, size in zip(times, sizes_of(config), strict=True)]
    transfer, splits = transfer_seconds(config, timer), not config.train.compile
    return Problem(plan.placement, m, tuple(stages), limits, transfer, splits, _beside(plan, times))


def _costs(time: StageTime, size: StageCosts) -> StageCosts:
    back, weight = time.backward.total - time.weights, time.weights
    longer = 1 + SPLIT
    return StageCosts(time.forward.total, time.backward.total, longer * back, longer * weight, size.kept, size.waiting)


def _beside(plan: Plan, times: list[StageTime]) -> Beside | None:
    mode = sharding_mode(plan.config)
    if mode is None:
        return None
    return Beside(
        gathers=tuple(time.gather for time in times) if mode != "zero3" else None,
        each=mode in ("zero2", "zero3"),
        slower=tuple((time.slowed(False), time.slowed(True)) for time in times),
        after_whole=tuple((time.left(False), time.left(True)) for time in times),
        after_split=tuple((time.reducing(False), time.reducing(True)) for time in times),
    )


def seconds_under(plan: Plan, table: Table, timer: Timer) -> float:
    """Seconds of a whole step of `plan` under `table`, as `predict` tells of a schedule file with it."""
    whole = sharded(table, sharding_mode(plan.config))
    clock, stages = clock_of(whole, costs_of(whole)), timer.stages(plan)
    end, _ = clock.run([seconds_of(cost, stages) for cost in clock.classes], transfer_seconds(plan.config, timer))
    return end + Trial(plan, timer).update
