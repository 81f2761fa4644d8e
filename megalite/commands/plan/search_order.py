"""An order of a pipeline's actions for its very stages, on this cluster, within a GPU's memory.

Named schedules and searched orders wait in a heap by the seconds of a step, and placements for which nothing was
searched yet by seconds that no order falls below. The first order that comes to the front and fits into memory is the
answer. So it is never slower than a named schedule that fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from megalite.base.errors import InputError
from megalite.commands.plan.request import Asked
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.activation_room import MAX_TRIES, memory_under, room_beside, tightened
from megalite.cost.order_costs import problem_of, seconds_under
from megalite.cost.predict import Trial
from megalite.layout_search.time_bounds import VIRTUAL_STAGES
from megalite.plan.memory.peak import each_rank
from megalite.plan.pipeline import micro_batches, sharded, sharding_mode
from megalite.plan.resolved import Plan, resolve
from megalite.schedule.actions import Orders, Table
from megalite.schedule.communication import communicate
from megalite.schedule.generate import (
    AUTO_SCHEDULE,
    NAMES,
    ONE_STAGE_SCHEDULES,
    SPLIT_SCHEDULES,
    V_SCHEDULES,
    orders_of,
)
from megalite.schedule.search import EFFORT, search

MIN_ORDERS = 20  # orders: where a search could not try more, it takes long and seldom finds any


@dataclass(frozen=True)
class Order:
    """The order for a layout. config: the layout with the placement that the order is for.

    memory: bytes of its fullest rank. seconds: of a step. name: of the named schedule that it is, or "auto". own,
    own_memory: the same of the schedule that the layout had. is_own: whether that is the order.
    """

    config: Config
    table: Table
    memory: int
    seconds: float
    name: str
    own: float
    own_memory: int
    is_own: bool

    @property
    def stages_per_rank(self) -> int:
        return self.table.stages // self.table.ranks

    def of(self, path: str) -> Config:
        """The layout with this order, which is the schedule file `path`."""
        pipeline = replace(
            self.config.parallel.pipeline, schedule=path, virtual_stages=self.stages_per_rank, memory=None
        )
        return replace(self.config, parallel=replace(self.config.parallel, pipeline=pipeline))


def best_order(asked: Asked, config: Config) -> Order:
    """The fastest order found for the layout of `config`, whose pipeline may get another placement of stages.

    Raises InputError for a layout without a pipeline, for batches that grow, and if no order fits.
    """
    if config.parallel.pp == 1:
        raise InputError(
            "--schedule: parallel.pp = 1 is no pipeline, so there is no order to search; "
            "give parallel.pp, or --pick a row that has one"
        )
    if config.batch.rampup is not None:
        raise InputError("--schedule: a schedule file is for one number of micro-batches; leave batch.rampup out")
    heap, number = list[_Entry](), count()

    def add(seconds: float, placed: _Placed, name: str, orders: Orders | None, timed: bool = False) -> None:
        heappush(heap, _Entry(seconds, next(number), placed, name, orders, timed))

    placements = list(_placements(asked, config))
    for placed in placements:
        for name, named in placed.named.items():
            add(placed.seconds(named), placed, name, named)
        if not placed.is_long or placed.schedule != "interleaved_1f1b":
            add(placed.bound, placed, AUTO_SCHEDULE, None)
    while heap:
        entry = heappop(heap)
        seconds, placed, name, orders = entry.seconds, entry.placed, entry.name, entry.orders
        if orders is None:
            if found := placed.search():
                add(max(seconds, found[0]), placed, *found[1:])
            continue
        if config.train.recompute == "budget" and not entry.timed:  # an order decides what layers recompute
            add(max(seconds, placed.exactly(name, orders)), placed, name, orders, timed=True)
            continue
        memory = placed.memory(name, orders)
        if max(memory) <= asked.limit:
            first = placements[0]
            return Order(
                placed.config,
                placed.table(name, orders),
                max(memory),
                seconds,
                name,
                own=first.seconds(first.named[first.schedule]),
                own_memory=first.own_memory,
                is_own=placed.is_own(orders),
            )
        if name == AUTO_SCHEDULE and placed.tries < MAX_TRIES:
            placed.tighten(memory)
            add(seconds, placed, AUTO_SCHEDULE, None)
    raise InputError("--schedule: no order of this pipeline fits into memory; see --explain for what would")


class _Placed:
    """A layout with one placement of stages, whose order is to be found.

    config: with a schedule that has it. first: whether this is the layout's own.
    """

    def __init__(self, asked: Asked, config: Config, first: bool) -> None:
        self.asked, self.config, self.m, self.first = asked, config, micro_batches(config), first
        self.plan, self.tries = resolve(config, costing=asked.timer.costs), 0
        self.schedule = config.parallel.pipeline.schedule
        self.named = dict(self._named())
        problem = problem_of(self.plan, self.m, (), asked.timer)
        counted = problem.peaks(problem.coded(self.named[self.schedule]))
        held = [memory.total for memory in each_rank(config, self.plan)]
        self.own_memory = max(held)
        self.problem = replace(problem, limits=room_beside(held, counted, asked.limit))
        self.update = Trial(self.plan, asked.timer).update

    def _named(self) -> Iterator[tuple[str, Orders]]:
        """The schedules that place stages likewise: the configuration's own first, then others that have names."""
        pp, stages = self.config.parallel.pp, self.config.parallel.pipeline.stages_per_rank
        if self.schedule not in NAMES:
            yield self.schedule, self.plan.table(self.m).orders
        others = (name for name in (*ONE_STAGE_SCHEDULES, *V_SCHEDULES, "interleaved_1f1b") if name != self.schedule)
        for name in (self.schedule, *others):
            if name in NAMES and not (self.config.train.compile and name in SPLIT_SCHEDULES):
                try:
                    placement, orders = orders_of(name, pp, self.m, stages)
                except InputError:  # another number of stages
                    continue
                if placement == self.plan.placement:
                    yield name, orders

    @property
    def bound(self) -> float:
        """Seconds that a step takes under any order."""
        return self.problem.bound + self.update

    @property
    def is_long(self) -> bool:
        return 3 * self.m * self.plan.stages * MIN_ORDERS > EFFORT

    def is_own(self, orders: Orders) -> bool:
        """Return whether these are the orders that the layout has."""
        return self.first and orders is self.named[self.schedule]

    def seconds(self, orders: Orders) -> float:
        """Return the seconds of a step, with layers' recompute as it is under `config`."""
        return self.problem.makespan(self.problem.coded(orders)) + self.update

    def exactly(self, name: str, orders: Orders) -> float:
        """Seconds of a step, with layers' recompute as it is under these orders."""
        return seconds_under(self._planned(name, orders), self.table(name, orders), self.asked.timer)

    def search(self) -> tuple[float, str, Orders] | None:
        """The fastest order found for what is left of memory: its seconds, name and actions; None if none has no name
        yet."""
        of, self.tries = self.problem, self.tries + 1
        try:
            found = search(of.placement, self.m, of.stages, of.limits, of.transfer, of.splits, of.beside)
        except InputError:
            return None
        return (found.makespan + self.update, AUTO_SCHEDULE, found.orders) if found.name == AUTO_SCHEDULE else None

    def memory(self, name: str, orders: Orders) -> list[int]:
        """Bytes of every rank under the file of these orders, or under the layout's own schedule, which is kept."""
        if self.is_own(orders):
            return [memory.total for memory in each_rank(self.config, self.plan)]
        return memory_under(self._planned(name, orders), self.m)

    def tighten(self, memory: list[int]) -> None:
        """Leave less room to those ranks whose `memory` was more than the limit."""
        limits = tightened(self.problem.limits, memory, self.asked.limit)
        self.problem = replace(self.problem, limits=limits)

    def table(self, name: str, orders: Orders) -> Table:
        """The orders with their transfers."""
        times, placement = self.problem.times, self.problem.placement
        shown = "searched" if name == AUTO_SCHEDULE else name
        return Table(shown, self.m, placement, communicate(orders, placement, times), times)

    def _planned(self, name: str, orders: Orders) -> Plan:
        """The plan under these orders, by which layers with a budget choose how they recompute."""
        if self.is_own(orders):
            return self.plan
        table = sharded(self.table(name, orders), sharding_mode(self.config))
        return resolve(self.config, tables={self.m: table}, costing=self.asked.timer.costs)


class _Entry(NamedTuple):
    """An order, or a placement for which one is to be searched."""

    seconds: float  # or a bound of them
    number: int  # so that nothing else is compared
    placed: _Placed
    name: str
    orders: Orders | None  # None: to be searched
    timed: bool  # with layers' recompute as it is under the order


def _placements(asked: Asked, config: Config) -> Iterator[_Placed]:
    """Yield each placement of stages that the layers allow, the layout's own first."""
    own, seen = config.parallel.pipeline, set[tuple[int, ...]]()
    names = [(own.schedule, own.virtual_stages), ("1f1b", None), ("zbv", None)]
    for schedule, virtual in (*names, *(("interleaved_1f1b", virtual) for virtual in VIRTUAL_STAGES)):
        if config.train.compile and schedule in SPLIT_SCHEDULES:
            continue
        memory = own.memory if schedule == AUTO_SCHEDULE else None
        pipeline = replace(own, schedule=schedule, virtual_stages=virtual, memory=memory)
        other = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        try:
            placed = _Placed(asked, check(other, config.parallel.layout.world_size), first=not seen)
        except InputError:
            continue
        if placed.plan.placement not in seen:
            seen.add(placed.plan.placement)
            yield placed
