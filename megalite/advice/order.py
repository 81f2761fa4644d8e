"""An order of a pipeline's actions for its very stages, on this cluster, within a GPU's memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.advice.asked import Asked
from megalite.config.errors import InputError
from megalite.config.schema import Config
from megalite.config.validate import check
from megalite.plan.automatic import costs_of
from megalite.plan.memory import memory_of_ranks
from megalite.plan.pipeline import micro_batches, sharded, sharding_mode
from megalite.plan.resolved import resolve
from megalite.plan.walk import Walk, on_device
from megalite.planner.predict import transfer_seconds
from megalite.schedule.actions import Table
from megalite.schedule.communication import communicate
from megalite.schedule.problem import StageCosts
from megalite.schedule.search import search

TRIES = 3  # each with less room for activations, until the walk through memory finds that they fit
LESS = 0.93


@dataclass(frozen=True)
class Order:
    """A searched order. config: the layout with the placement that the order is for. memory: of its fullest rank."""

    config: Config
    table: Table
    memory: int
    seconds: float  # of the order alone, with the stages' times

    @property
    def stages_per_rank(self) -> int:
        return self.table.stages // self.table.ranks


def best_order(asked: Asked, config: Config) -> Order:
    """The fastest order found for the layout of `config`, whose pipeline may get another placement of stages.

    Raises InputError for a layout without a pipeline, and if no order fits.
    """
    if config.parallel.pp == 1:
        raise InputError("--schedule: parallel.pp = 1 is no pipeline, so there is no order to search")
    found = list(_orders(asked, config))
    if not found:
        raise InputError("--schedule: no order of this pipeline fits into memory; see --explain for what would")
    return min(found, key=lambda order: order.seconds)


def _orders(asked: Asked, config: Config) -> Iterator[Order]:
    """One for each placement that the layers allow: one stage on a rank, and two as a V."""
    for schedule in ("1f1b", *(["zbv"] if not config.train.compile else [])):
        pipeline = replace(config.parallel.pipeline, schedule=schedule, virtual_stages=None, split=None)
        other = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        try:
            order = _order(asked, check(other, config.parallel.layout.world_size))
        except InputError:
            continue
        if order is not None:
            yield order


def _order(asked: Asked, config: Config) -> Order | None:
    plan, m = resolve(config), micro_batches(config)
    times, sizes = asked.timer.stages(plan), costs_of(config)
    stages = [
        StageCosts(
            time.forward.total,
            time.backward.total,
            time.backward.total - time.weights,
            time.weights,
            size.kept,
            size.waiting,
        )
        for time, size in zip(times, sizes, strict=True)
    ]
    beside = []  # bytes of every rank that are no activations in flight
    for memory in memory_of_ranks(config):
        put_off = memory.of("gradients").get("put off", 0)
        beside.append(memory.total - sum(memory.of("activations").values()) - put_off)
    for tried in range(TRIES):
        limits = [LESS**tried * (asked.limit - other) for other in beside]
        try:
            found = search(
                plan.placement, m, stages, limits, transfer_seconds(config, asked.timer), not config.train.compile
            )
        except InputError:
            return None
        each = tuple(stage.times for stage in stages)
        table = Table("searched", m, plan.placement, communicate(found.orders, plan.placement, each), each)
        walked = resolve(config, tables={m: sharded(table, sharding_mode(config))})
        memory_of = [on_device(Walk(walked, m, pp).run()) for pp in range(config.parallel.pp)]
        if max(memory_of) <= asked.limit:
            return Order(config, table, max(memory_of), found.makespan)
    return None
