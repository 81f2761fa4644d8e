"""Input of a search for an order of a pipeline, and the time of a step under an order. Imports no torch.

Both have the times by which `predict` predicts a step: those of stages on this cluster, halves of a backward pass that
take longer than the whole, transfers, and weights and gradients that are exchanged beside compute.
"""

from megalite.config.schema import Config
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import Trial
from megalite.cost.rank_seconds import seconds_of
from megalite.cost.schedule_tables import costs_of
from megalite.cost.stages import Timer, transfer_seconds
from megalite.plan.automatic import Costing
from megalite.plan.pipeline import sharded, sharding_mode
from megalite.plan.resolved import Plan
from megalite.schedule.actions import Table
from megalite.schedule.clock import clock_of
from megalite.schedule.problem import Problem


def costing_of(config: Config) -> Costing | None:
    """Return the costing of `schedule: auto` under `run.cluster`; None, which stands for FLOPs, where that is null.

    Raises InputError for a cluster that is not known.
    """
    name = config.run.cluster
    return None if name is None else Timer(load_cluster(name, "run.cluster = ")).costs


def problem_of(plan: Plan, m: int, limits: tuple[float, ...], timer: Timer) -> Problem:
    """Problem of the search for an order: `plan`'s stages in a step of `m` micro-batches, in seconds and bytes.

    limits: bytes of activations by rank. With `train.recompute: budget`, modes of layers are those of the plan, though
    another order may lead to others.
    """
    costs, splits = timer.costs_of(plan), not plan.config.train.compile
    return Problem(plan.placement, m, costs.stages, limits, costs.transfer, splits, costs.beside)


def seconds_under(plan: Plan, table: Table, timer: Timer) -> float:
    """Seconds of a whole step of `plan` under `table`, as `predict` gives for a schedule file with it."""
    whole = sharded(table, sharding_mode(plan.config))
    clock, stages = clock_of(whole, costs_of(whole)), timer.stages(plan)
    end, _ = clock.run([seconds_of(cost, stages) for cost in clock.classes], transfer_seconds(plan.config, timer.net))
    trial = Trial(plan, timer)
    return max(end, trial.sending) + trial.update
