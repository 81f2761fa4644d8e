"""Time and memory of a pipeline schedule, from the cost of its actions.

Times may be ints, floats or Fractions; the arithmetic keeps to what it is given, so whole numbers and
Fractions give exact results.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from megalite.config.errors import InputError
from megalite.schedule.actions import Action, Exchange, Kind, Table

Time = float | Fraction
Cost = Callable[[Action], Time]

LIVE = {Kind.F: +1, Kind.B: -1}  # how many more stage-activations a rank holds after the action


@dataclass(frozen=True)
class Span:
    """When one action runs."""

    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """When every action of a table runs, and what that costs; times in the unit of the costs."""

    spans: tuple[tuple[Span, ...], ...]  # of every rank, in the order of its program
    peak_live: tuple[int, ...]  # of every rank: most stage-activations held at once, from the end of F to the end of B

    @property
    def makespan(self) -> Time:
        return max(span.end for rank in self.spans for span in rank)

    @property
    def bubbles(self) -> tuple[Time, ...]:
        """Share of the makespan in which each rank computes nothing."""
        busy = [sum(span.end - span.start for span in rank if span.action.is_compute) for rank in self.spans]
        makespan = self.makespan
        return tuple((makespan - time) / makespan for time in busy)

    @property
    def bubble(self) -> Time:
        """Share of all ranks' time in which they compute nothing."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(table: Table, cost: Mapping[Kind, Time] | Cost, transfer: Time = 0) -> Timeline:
    """Runs `table` on ranks that compute without waiting for their own transfers.

    cost: time of a compute action, by kind or by a function of the action (where stages differ).
    transfer: time from the end of an action until its result is on another rank; overlaps with compute.
    Raises InputError if the order of compute actions cannot make progress.
    """
    orders = [[item for item in program if isinstance(item, Action)] for program in table.programs]
    computed = execute(orders, table.placement, cost if callable(cost) else lambda action: cost[action.kind], transfer)
    sent = {action.send: span.end for action, span in computed.items()}

    def spans(item: Action | Exchange) -> list[Span]:
        if isinstance(item, Action):
            return [computed[item]]
        starts = [sent[action.transfer] for action in item.actions]
        return [Span(action, start, start + transfer) for action, start in zip(item.actions, starts, strict=True)]

    return Timeline(
        spans=tuple(tuple(span for item in program for span in spans(item)) for program in table.programs),
        peak_live=tuple(max(accumulate((LIVE[action.kind] for action in order), initial=0)) for order in orders),
    )


def execute(
    orders: Sequence[Sequence[Action]], placement: Sequence[int], cost: Cost, transfer: Time = 0
) -> dict[Action, Span]:
    """When each compute action runs, if every rank keeps to its order and starts as soon as its inputs are there.

    orders: compute actions of every rank. Raises InputError where ranks wait for each other.
    """
    spans: dict[Action, Span] = {}
    free: list[Time] = [0] * len(orders)
    queues = [deque(order) for order in orders]

    def missing(action: Action) -> list[Action]:
        return [source for source in action.inputs(len(placement)) if source not in spans]

    def arrival(source: Action, rank: int) -> Time:
        return spans[source].end + (0 if placement[source.stage] == rank else transfer)

    moving = True
    while moving:
        moving = False
        for rank, queue in enumerate(queues):
            while queue and not missing(queue[0]):
                action = queue.popleft()
                start = max([free[rank], *(arrival(source, rank) for source in action.inputs(len(placement)))])
                spans[action] = Span(action, start, start + cost(action))
                free[rank] = spans[action].end
                moving = True

    stuck = [
        f"rank {rank} is stuck at {queue[0]}, which needs {' and '.join(map(str, missing(queue[0])))}"
        for rank, queue in enumerate(queues)
        if queue
    ]
    if stuck:
        raise InputError("the pipeline schedule cannot make progress: " + "; ".join(stuck))
    return spans
