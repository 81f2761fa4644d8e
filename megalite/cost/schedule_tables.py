"""Pipeline schedules that a search asks for again and again. Imports no torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megalite.config.schema import Config
from megalite.cost.held_bytes import steps_of
from megalite.plan.automatic import Costing
from megalite.plan.pipeline import as_full, pairs_up, placing_times, sharded, sharding_mode, table_of, uses_fsdp
from megalite.schedule.actions import Action, Kind, Orders, Table, pairs_of
from megalite.schedule.clock import Clock, Timed, clock_of
from megalite.schedule.communication import communicate
from megalite.schedule.generate import NAMES, orders_of
from megalite.schedule.reductions import reductions

ROUNDS = 8  # times the ranks of a pipeline: unequal stages take some rounds until each round is like the one before
PICTURE_ROUNDS = 3  # rounds, counted alike, of a step in a picture


def enough(config: Config, m: int, rounds: int = ROUNDS) -> int:
    """Micro-batches that suffice to time a step of `m`: the pipeline is full, and each more adds as much again.

    Whole rounds are left out, as what a micro-batch adds may depend on its place in its round. A test compares
    steps that are cut short with whole ones.
    """
    pp, schedule = config.parallel.pp, config.parallel.pipeline.schedule
    if schedule not in NAMES:  # a file, or a searched order, is for one number of micro-batches
        return m
    if (schedule, config.parallel.data_mode) == ("dualpipev", "zero2"):  # its reductions fall behind more and more
        return m
    return min(m, rounds * pp + m % pp)


def filled(config: Config, m: int) -> int:
    """A number of micro-batches, at most `m`, with which a step holds as much memory as with `m`."""
    pp, schedule = config.parallel.pp, config.parallel.pipeline.schedule
    if schedule not in NAMES or schedule == "gpipe":
        return m
    if schedule == "interleaved_1f1b":
        return as_full(config, m)
    return min(m, {"1f1b": pp + 2, "zb_h1": pp + 2, "zb_h2": 2 * pp}.get(schedule, 3 * pp))


class Cost(NamedTuple):
    """Actions that take equally long: of one kind, on one stage.

    reduces: whether gradients are reduced beside it, or by it. last: whether replicas are summed then, too. split:
    whether it follows a W, beside which nothing was reduced. beside: of an F or B that takes turns with a pass of
    another stage, that stage.
    """

    kind: Kind
    stage: int
    reduces: bool = False
    last: bool = False
    split: bool = False
    beside: int | None = None


class Tables:
    """Tables by what they depend on. Named schedules are not checked again: tests prove them for all sizes.

    costing: what `auto` searches for; None: FLOPs.
    """

    def __init__(self, costing: Costing | None = None) -> None:
        self._costing = costing
        self._orders: dict[tuple[object, ...], tuple[tuple[int, ...], Orders]] = {}
        self._steps: dict[tuple[object, int], list[int]] = {}
        self._tables: dict[tuple[object, ...], Table] = {}
        self._clocks: dict[tuple[object, ...], Clock[Cost]] = {}
        self._others: dict[int, tuple[Table, Clock[Cost]]] = {}

    def of(self, config: Config, m: int, transfers: bool = False) -> Table:
        """The schedule of a step of `m` micro-batches; transfers: with those between ranks, of a named one too.

        Raises InputError for one that cannot run.
        """
        if config.parallel.pipeline.schedule not in NAMES:
            return table_of(config, m, self._costing)
        times, paired = placing_times(config) if transfers else None, pairs_up(config)
        key = *self._named(config, m), _when(config), transfers, times, paired
        if key not in self._tables:
            placement, orders = self.orders(config, m)
            programs = communicate(orders, placement, times, paired) if transfers else orders
            table = Table(config.parallel.pipeline.schedule, m, placement, programs, paired=paired)
            self._tables[key] = sharded(table, sharding_mode(config))
        return self._tables[key]

    def orders(self, config: Config, m: int) -> tuple[tuple[int, ...], Orders]:
        """The placement and the compute of a named schedule."""
        key = self._named(config, m)
        if key not in self._orders:
            self._orders[key] = orders_of(*key)
        return self._orders[key]

    def steps(self, config: Config, m: int, rank: int, paired: bool) -> list[int]:
        """Steps of a rank of a named schedule, as `held` counts them.

        paired: as in `Table`. The F of a pair then counts behind its B, as it adds bytes while B frees some.
        """
        key = *self._named(config, m), paired
        if (key, rank) not in self._steps:
            order = list(self.orders(config, m)[1][rank])
            for first, second in pairs_of([order]).items() if paired else ():
                at = order.index(first)
                order[at : at + 2] = second, first
            self._steps[key, rank] = steps_of(order)
        return self._steps[key, rank]

    def clock(self, config: Config, m: int) -> Clock[Cost]:
        """A clock for a step of `m` micro-batches under a named schedule."""
        key = *self._named(config, m), _when(config), (paired := pairs_up(config))
        if key not in self._clocks:
            self._clocks[key] = named_clock(*self.orders(config, m), m, sharding_mode(config), paired)
        return self._clocks[key]

    def clock_of(self, table: Table) -> Clock[Cost]:
        """A clock for a step under a schedule without a name. The table is kept, so that no other has its `id`."""
        if id(table) not in self._others:
            self._others[id(table)] = table, clock_of(table, costs_of(table))
        return self._others[id(table)][1]

    def _named(self, config: Config, m: int) -> tuple[str, int, int, int]:
        pipeline = config.parallel.pipeline
        return pipeline.schedule, config.parallel.pp, m, pipeline.stages_per_rank


def _when(config: Config) -> tuple[bool, bool] | None:
    """Return whether weights are gathered, and gradients reduced, at moments of their own; None without FSDP2."""
    mode = config.parallel.data_mode
    return (mode != "zero3", mode in ("zero2", "zero3")) if uses_fsdp(config) else None


def named_clock(
    placement: Sequence[int], orders: Orders, m: int, mode: str | None, paired: bool = False
) -> Clock[Cost]:
    """The clock of a schedule whose gradients `mode` reduces; None: without FSDP2. paired: as in `Table`.

    It is that of the table which `plan.pipeline.sharded` makes of the orders, and is found without it.
    """
    splits = any(action.kind is Kind.W for action in orders[0])
    each_time, numbers = mode in ("zero2", "zero3"), dict[Cost, int]()

    def numbered(cost: Cost) -> int:
        return numbers.setdefault(cost, len(numbers))

    found = []
    for order in orders:
        first, last = dict[int, int](), dict[int, int]()
        for index, (_, stage, _) in enumerate(order):
            first.setdefault(stage, index)
            last[stage] = index
        timed: list[Timed] = []
        gathers = [(max(0, index - 1), stage) for stage, index in first.items()] if mode not in (None, "zero3") else []
        others = _partners(order) if paired else {}
        known = dict[object, tuple[int, int]]()  # numbers of an action, and of the reduction after it
        for index, (kind, stage, micro) in enumerate(order):
            while gathers and gathers[0][0] <= index:
                gathered = gathers.pop(0)[1]
                timed.append((Kind.GATHER, gathered, micro, numbered(Cost(Kind.GATHER, gathered))))
            key = kind, stage, ends, beside = kind, stage, index == last[stage], others.get(index)
            if key not in known:
                whole = kind is Kind.B
                reduces = mode is not None and (whole or kind is Kind.W) and (each_time or ends)
                replicas = ends or splits
                beside_it = whole and reduces
                number = numbered(Cost(kind, stage, beside_it, beside_it and replicas, beside=beside))
                after = numbered(Cost(Kind.REDUCE, stage, True, replicas, not whole)) if reduces else -1
                known[key] = number, after
            number, after = known[key]
            timed.append((kind, stage, micro, number))
            if after >= 0:
                timed.append((Kind.REDUCE, stage, micro, after))
        found.append(timed)
    return Clock(found, placement, m, list(numbers), paired)


def _partners(order: Sequence[Action]) -> dict[int, int]:
    """By place in an order, of those passes that take turns: the stage of the other."""
    found, pairs = dict[int, int](), pairs_of([order])
    for index, action in enumerate(order):
        if (second := pairs.get(action)) is not None:
            found[index], found[index + 1] = second.stage, action.stage
    return found


def costs_of(table: Table) -> Callable[[Action], Cost]:
    """By action of `table`: what its time depends on."""
    each = (reductions(table, rank) for rank in range(table.ranks))
    reduced = {action: found for rank in each for action, found in rank.items()}
    others = {first: second.stage for first, second in table.pairs.items()}
    others |= {second: first.stage for first, second in table.pairs.items()}

    def of(action: Action) -> Cost:
        kind, stage, micro = action
        if kind is Kind.B:
            found = reduced[action]
            return Cost(kind, stage, found.now, found.now and found.replicas, beside=others.get(action))
        if kind is Kind.REDUCE:
            whole = reduced.get(Action(Kind.B, stage, micro))
            found = whole or reduced[Action(Kind.W, stage, micro)]
            return Cost(kind, stage, True, found.replicas, split=whole is None)
        return Cost(kind, stage, beside=others.get(action))

    return of
