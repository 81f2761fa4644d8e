"""Time and memory of a pipeline schedule, from the cost of its actions.

Times may be ints, floats or Fractions. The arithmetic stays in the given type, so whole numbers and Fractions give
exact results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

from megalite.base.errors import InputError
from megalite.schedule.actions import (
    COMPUTE,
    SENDS_BY_KIND,
    SHARDING,
    Action,
    Exchange,
    Kind,
    Name,
    Table,
    Times,
    inputs_of,
)

Time = float | Fraction
Cost = Callable[[Action], Time]

UNIT: Mapping[Kind, Time] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}  # both halves of backward cost a forward
COLUMN = {kind: number for number, kind in enumerate(COMPUTE)}  # column of a kind in Times
NO_PAIRS: Mapping[Action, Action] = {}
LIVE_CHANGES = {Kind.F: +1, Kind.B: -1, Kind.W: -1}  # how many more stage-activations a rank holds after the action


class Span(NamedTuple):
    """Start and end of one action."""

    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action of a table, and what follows from them; times are in the unit of the costs."""

    table: Table
    transfer: Time  # how long one takes
    own: tuple[tuple[Span, ...], ...]  # compute and sharding of every rank, in order
    peak_live: tuple[int, ...]  # most stage-activations that each rank holds at once, from F to the end of B or W

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """By rank, in the order of its program: when each action runs, transfers included."""
        sent = {span.action.send: span.end for rank in self.own for span in rank if span.action.kind in SENDS_BY_KIND}

        def merged(rank: int) -> Iterator[Span]:
            own = iter(self.own[rank])
            for item in self.table.programs[rank]:
                if isinstance(item, Exchange):
                    for action in item.actions:
                        start = sent[action.transfer]
                        yield Span(action, start, start + self.transfer)
                else:
                    yield next(own)

        return tuple(tuple(merged(rank)) for rank in range(self.table.ranks))

    @cached_property
    def makespan(self) -> Time:
        """The end of the last action; a transfer ends before the compute that waits for it."""
        return max(end for rank in self.own for _, _, end in rank)

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """By rank: the time in which it computes."""
        return tuple(sum(end - start for action, start, end in rank if action.is_compute) for rank in self.own)

    @cached_property
    def bubbles(self) -> tuple[Time, ...]:
        """By rank: the share of the makespan in which it computes nothing."""
        makespan = self.makespan
        return tuple((makespan - time) / makespan for time in self.busy)

    @property
    def bubble(self) -> Time:
        """The share of all ranks' time in which they compute nothing."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def stalls(self) -> tuple[Time, ...]:
        """By rank: the time in which it computes nothing between its first and its last compute.

        This is what the zero-bubble papers call the bubble (arXiv 2401.10241 §2.2). It leaves out the ramps at both
        ends of a step, which cost nothing only if ranks may start the next step at different times.
        """
        compute = [[span for span in rank if span.action.is_compute] for rank in self.own]
        return tuple(
            spans[-1].end - spans[0].start - busy if spans else 0
            for spans, busy in zip(compute, self.busy, strict=True)
        )


def cost_of(times: Times | None) -> Cost:
    """The time of compute: by stage where `times` are given, else UNIT. Sharding is free."""
    if times is None:
        return lambda action: UNIT.get(action.kind, 0)
    return lambda action: times[action.stage][COLUMN[action.kind]] if action.kind in COLUMN else 0


def simulate(table: Table, cost: Mapping[Kind, Time] | Cost | None = None, transfer: Time = 0) -> Timeline:
    """Runs `table` on ranks that compute without waiting for their own transfers.

    cost: time of an action, by kind or by a function of the action (where stages differ). By kind, sharding is
        free unless it is given. None: the times that the table is made for.
    transfer: time from the end of an action until its result is on another rank; overlaps with compute.
    Raises InputError if the order of compute actions cannot make progress.
    """
    costs = {**dict.fromkeys(SHARDING, 0), **cost} if isinstance(cost, Mapping) else cost or cost_of(table.times)
    orders = [[item for item in program if isinstance(item, Action)] for program in table.programs]
    of = costs if callable(costs) else lambda action: costs[action.kind]
    return Timeline(
        table,
        transfer,
        own=tuple(map(tuple, execute(orders, table.placement, of, transfer, table.pairs))),
        peak_live=tuple(max(accumulate((LIVE_CHANGES.get(a.kind, 0) for a in order), initial=0)) for order in orders),
    )


def execute(
    orders: Sequence[Sequence[Action]],
    placement: Sequence[int],
    cost: Cost,
    transfer: Time = 0,
    pairs: Mapping[Action, Action] = NO_PAIRS,
) -> list[list[Span]]:
    """Spans of all actions, if every rank keeps to its order and starts each as soon as its inputs are there.

    orders: compute and sharding actions of every rank. Sharding starts when the compute before it has ended, and runs
    beside the compute after it, one collective at a time. Only compute on a stage that is being gathered waits. pairs:
    `Table.pairs`. The F of a pair begins when the inputs of both are there; its result is there when B ends. Raises
    InputError where ranks wait for each other.
    """
    spans: list[list[Span]] = [[] for _ in orders]
    ended: dict[Name, Time] = {}  # by result
    gathered: dict[int, Time] = {}  # by stage
    compute_free: list[Time] = [0] * len(orders)
    network_free: list[Time] = [0] * len(orders)
    awaited: dict[Name, list[int]] = {}  # result -> ranks that wait for it
    stages, gather = len(placement), Kind.GATHER

    def run(action: Action, rank: int) -> Name | None:
        """Run an action if its inputs are there; else return the first result that it lacks."""
        start = compute_free[rank]
        if action.kind in SHARDING:
            start = max(start, network_free[rank])
            end = network_free[rank] = start + cost(action)
            if action.kind is gather:
                gathered[action.stage] = end
        else:
            beside = pairs.get(action)
            for source in inputs_of(action, beside, stages):
                there = ended.get(source)
                if there is None:
                    return source
                if placement[source[1]] != rank:
                    there += transfer
                if there > start:
                    start = there
            if gathered:
                start = max(start, gathered.get(action.stage, 0))
            end = compute_free[rank] = ended[action.result] = start + cost(action)
            if beside is not None:
                ended[action.result] = end + cost(beside)
        spans[rank].append(Span(action, start, end))
        return None

    ready = list(reversed(range(len(orders))))
    while ready:
        rank = ready.pop()
        for action in islice(orders[rank], len(spans[rank]), None):
            lacking = run(action, rank)
            if lacking is not None:
                awaited.setdefault(lacking, []).append(rank)
                break
            if awaited and action.is_compute:
                ready += awaited.pop(action.result, ())

    waiting = {
        rank: order[len(ran)] for rank, (order, ran) in enumerate(zip(orders, spans, strict=True)) if order[len(ran) :]
    }
    if waiting:
        makers = {action.result: action for order in orders for action in order}
        stuck = []
        for rank, action in waiting.items():
            needed = inputs_of(action, pairs.get(action), stages)
            missing = [makers.get(name, Action(*name)) for name in needed if name not in ended]
            stuck.append(f"rank {rank} is stuck at {action}, which needs {' and '.join(map(str, missing))}")
        raise InputError("the pipeline schedule cannot make progress: " + "; ".join(stuck))
    return spans
