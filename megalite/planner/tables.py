"""Pipeline schedules that a search asks for again and again. Imports no torch."""

from collections.abc import Callable
from typing import NamedTuple

from megalite.config.schema import Config
from megalite.plan.automatic import wanted
from megalite.plan.pipeline import sharded, sharding_mode, table_of, uses_fsdp
from megalite.schedule.actions import Action, Kind, Table
from megalite.schedule.clock import Clock
from megalite.schedule.communication import communicate
from megalite.schedule.generate import AUTO, NAMES, orders_of
from megalite.schedule.reductions import reductions

ROUNDS = 8  # times the ranks of a pipeline: unequal stages take some rounds until each round is like the one before
PICTURED = 3  # of these rounds, in a picture


def enough(config: Config, m: int, rounds: int = ROUNDS) -> int:
    """How many micro-batches of a step of `m` tell its time: the pipeline is full, and each more adds as much again.

    What is left out are whole rounds, as what a micro-batch adds may depend on its place in its round. A test compares
    steps that are cut short with whole ones.
    """
    pp, schedule = config.parallel.pp, config.parallel.pipeline.schedule
    if schedule not in NAMES:  # a file, or a searched order, is for one number of micro-batches
        return m
    return min(m, rounds * pp + m % pp)


class Cost(NamedTuple):
    """Actions that take equally long: of one kind, on one stage.

    reduces: whether gradients are reduced beside it, or by it. last: whether replicas are summed then, too. split:
    whether it follows a W, beside which nothing was reduced.
    """

    kind: Kind
    stage: int
    reduces: bool = False
    last: bool = False
    split: bool = False


class Tables:
    """Tables by what they depend on. Named schedules are not checked again: tests prove them for all sizes."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], Table] = {}
        self._clocks: dict[tuple[object, ...], Clock[Cost]] = {}

    def of(self, config: Config, m: int, transfers: bool = False) -> Table:
        """The schedule of a step of `m` micro-batches; transfers: with those between ranks, of a named one too.

        Raises InputError for one that cannot run.
        """
        if config.parallel.pipeline.schedule not in NAMES:
            return table_of(config, m)
        key = *self._key(config, m), transfers
        if key not in self._tables:
            pipeline = config.parallel.pipeline
            placement, orders = orders_of(pipeline.schedule, config.parallel.pp, m, pipeline.stages_per_rank)
            table = Table(pipeline.schedule, m, placement, communicate(orders, placement) if transfers else orders)
            self._tables[key] = sharded(table, sharding_mode(config))
        return self._tables[key]

    def clock(self, config: Config, m: int) -> Clock[Cost]:
        """A clock for a step of `m` micro-batches."""
        key = self._key(config, m)
        if key not in self._clocks:
            table = self.of(config, m)
            self._clocks[key] = Clock(table, costs_of(table))
        return self._clocks[key]

    def _key(self, config: Config, m: int) -> tuple[object, ...]:
        pipeline, mode = config.parallel.pipeline, config.parallel.data.mode
        when = (mode != "zero3", mode in ("zero2", "zero3")) if uses_fsdp(config) else None
        if pipeline.schedule == AUTO:  # its order depends on costs
            return wanted(config, m), when
        return pipeline.schedule, config.parallel.pp, m, pipeline.stages_per_rank, when


def costs_of(table: Table) -> Callable[[Action], Cost]:
    """By action of `table`: what its time depends on."""
    each = (reductions(table, rank) for rank in range(table.ranks))
    reduced = {action: found for rank in each for action, found in rank.items()}

    def of(action: Action) -> Cost:
        kind, stage, micro = action
        if kind is Kind.B:
            found = reduced[action]
            return Cost(kind, stage, found.now, found.now and found.replicas)
        if kind is Kind.REDUCE:
            whole = reduced.get(Action(Kind.B, stage, micro))
            found = whole or reduced[Action(Kind.W, stage, micro)]
            return Cost(kind, stage, True, found.replicas, split=whole is None)
        return Cost(kind, stage)

    return of
