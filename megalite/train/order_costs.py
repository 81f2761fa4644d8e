"""Costs from which `schedule: auto` finds an order in a run. Rank 0 computes them, so all ranks make the same tables.

Each rank could work out the same times. But roundings differ from one C library to another, and an order depends on
which of two moments comes first.
"""

from functools import partial

import torch

from megalite.checkpoint.store.host_group import HostGroup
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster, load_cluster
from megalite.cost.gpu_names import cluster_of
from megalite.cost.stages import Timer
from megalite.cost.texts import searched_text
from megalite.plan import automatic
from megalite.plan.automatic import Costing, known_costing
from megalite.plan.pipeline import micro_batches
from megalite.schedule.actions import Table
from megalite.schedule.generate import AUTO_SCHEDULE
from megalite.train.build import Job


def cluster_of_run(config: Config, device: torch.device) -> Cluster | None:
    """The cluster `run.cluster`, or else the one that has this rank's GPU; None if neither is known.

    Raises InputError for `run.cluster` without a file that is one.
    """
    name = config.run.cluster
    if name is None and device.type == "cuda":
        name = cluster_of(torch.cuda.get_device_name(device))
    return None if name is None else load_cluster(name, "run.cluster = ")


def shared_costing(config: Config, cluster: Cluster | None, group: HostGroup) -> Costing | None:
    """Tells the costs of `config` that rank 0 has worked out for `cluster`, and no others. None: FLOPs, or no search.

    Collective.
    """
    if cluster is None or config.parallel.pipeline.schedule != AUTO_SCHEDULE:
        return None
    return known_costing(group.once(partial(Timer(cluster).costs, config)))


def searched_order(job: Job) -> Table | None:
    """The order of `schedule: auto` for steps of `batch.global`; None under another schedule."""
    config = job.config
    return job.plan.table(micro_batches(config)) if config.parallel.pipeline.schedule == AUTO_SCHEDULE else None


def schedule_text(job: Job) -> str:
    """The schedule of a run; of `auto` also which order it is, and what it was searched for."""
    order, config = searched_order(job), job.config
    if order is None:
        return f"schedule {config.parallel.pipeline.schedule}"
    if config.parallel.pp == 1:  # all orders are alike
        return f"schedule {order.name}"
    costs = automatic.wanted(config, micro_batches(config), job.plan.costing).costs
    return f"schedule {order.name}, where {searched_text(config, costs)}"
