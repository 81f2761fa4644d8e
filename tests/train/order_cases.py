"""What ranks do for tests of `schedule: auto`: search an order together, and train under it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import Mock, patch

from toy_jobs import CPU, advance

from megalite.checkpoint.store.host_group import HostGroup
from megalite.config.schema import Config
from megalite.cost.stages import Timer
from megalite.plan.pipeline import micro_batches
from megalite.schedule import search as searching
from megalite.train.build import Job, build, build_mesh
from megalite.train.order_costs import cluster_of_run, schedule_text, shared_costing
from megalite.train.recompute_costs import plan_for

Trained = tuple[str, str, list[float]]  # the schedule as a run tells it, its orders, and losses


def train_with_clusters(config: Config, clusters: Sequence[str | None], steps: int) -> Trained:
    """Train `config`; each rank names the cluster that `clusters` has for it, in turns."""
    with patch.object(searching, "EFFORT", 5_000):
        job = _job(config, clusters)
    return schedule_text(job), str(job.plan.table(micro_batches(job.config)).orders), advance(job, 0, steps)


def _job(config: Config, clusters: Sequence[str | None]) -> Job:
    group = HostGroup()
    mine = replace(config, run=replace(config.run, cluster=clusters[group.rank % len(clusters)]))
    cluster = group.once(partial(cluster_of_run, mine, CPU))
    with patch.object(Timer, "costs", Timer.costs if group.leads else Mock(side_effect=AssertionError)):
        costing = shared_costing(mine, cluster, group)
    mesh = build_mesh(mine, CPU)
    assert mesh is not None
    return build(plan_for(mine, mesh, costing), mesh)
