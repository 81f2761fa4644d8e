"""Simulated time of a table whose exchanges run one after the other on communicators, as NCCL runs them.

The host posts everything ahead, in the order of the program. On a communicator, a rank's exchanges run in that order.
One begins when what the rank computes before it has ended, since it may send the result, and ends with the last of its
transfers; what it receives is there no sooner. A transfer begins when the exchanges of both its ranks have begun, and
no transfer waits for another of its exchange.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from megalite.base.errors import InputError, listing
from megalite.schedule.actions import Action, Exchange, Table, inputs_of

Split = Callable[[Table, Action], Hashable]  # the communicator of a transfer, the same for both of its sides


class Side(NamedTuple):
    """One end of the span of a communicator's part of an exchange."""

    rank: int
    entry: int  # number in the rank's program
    communicator: Hashable
    begins: bool


Node = Action | Side  # a compute action, a transfer by its sending action, or a side of an exchange


def _one(table: Table, action: Action) -> Hashable:
    return None


def _by_direction(table: Table, action: Action) -> Hashable:
    sender, receiver = table.rank(action.transfer), table.peer(action.transfer)
    return sender < receiver if table.ranks == 2 else (receiver - sender) % table.ranks == 1


def _by_neighbour(table: Table, action: Action) -> Hashable:
    return frozenset((table.rank(action), table.peer(action)))


ONE, BY_DIRECTION, BY_NEIGHBOUR = "one", "by direction", "by neighbour"
SPLITS: Mapping[str, Split] = {ONE: _one, BY_DIRECTION: _by_direction, BY_NEIGHBOUR: _by_neighbour}


class Timing(NamedTuple):
    """Time of a step, and the share of all compute beside which an exchange runs or waits on the device."""

    makespan: float
    beside: float


class Communicators:
    """A table prepared to be timed again and again, with transfers on the communicators of `split`.

    Sharding is left out. Raises InputError if ranks wait for one another in a circle.
    """

    def __init__(self, table: Table, split: Split) -> None:
        self._table = table
        graph = _dependencies(table, split)
        try:
            order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            circle = [node for node in error.args[1][1:] if isinstance(node, Action)]
            raise InputError(f"the exchanges of this schedule wait for one another: {listing(circle, 'and')}") from None
        place = {node: number for number, node in enumerate(order)}
        self._steps = [(node, [place[other] for other in graph[node]]) for node in order]
        self._spans = [
            (number, place[node._replace(begins=False)])
            for number, node in enumerate(order)
            if isinstance(node, Side) and node.begins
        ]

    def run(self, costs: Mapping[Action, float]) -> Timing:
        """The time of a step. costs: of compute actions, and of transfers by their sending actions."""
        ends: list[float] = []
        compute: list[list[tuple[float, float]]] = [[] for _ in self._table.programs]
        exchanges: list[list[tuple[float, float]]] = [[] for _ in self._table.programs]
        for node, before in self._steps:
            end = start = max([ends[other] for other in before], default=0.0)
            if isinstance(node, Action):
                end = start + costs[node]
                if node.is_compute:
                    compute[self._table.rank(node)].append((start, end))
            ends.append(end)
        for begin, close in self._spans:
            side = self._steps[begin][0]
            assert isinstance(side, Side)
            exchanges[side.rank].append((ends[begin], ends[close]))
        shared = sum(map(_overlap, compute, exchanges))
        busy = sum(end - start for spans in compute for start, end in spans)
        return Timing(max(ends, default=0.0), shared / busy if busy else 0.0)


def _dependencies(table: Table, split: Split) -> dict[Node, list[Node]]:
    """By node, the nodes that end before it begins."""
    graph: dict[Node, list[Node]] = {}
    for rank, program in enumerate(table.programs):
        computed: list[Node] = []  # the newest compute
        newest: dict[Hashable, list[Node]] = {}  # the end of the newest exchange, by communicator
        brought: dict[Action, Node] = {}  # the end of an exchange, by what it receives
        for entry, item in enumerate(program):
            if isinstance(item, Exchange):
                parts: dict[Hashable, list[Action]] = {}
                for action in item.actions:
                    parts.setdefault(split(table, action), []).append(action)
                for communicator, actions in parts.items():
                    begin = Side(rank, entry, communicator, begins=True)
                    close = begin._replace(begins=False)
                    graph[begin] = [*computed, *newest.get(communicator, ())]
                    for action in actions:
                        graph.setdefault(action.transfer, []).append(begin)
                    graph[close] = [begin, *(action.transfer for action in actions)]
                    brought |= {action: close for action in actions if action != action.transfer}
                    newest[communicator] = [close]
            elif item.is_compute:
                needed = inputs_of(item, table.pairs.get(item), table.stages)
                received = [Action(*name).send.matching for name in needed if table.placement[name[1]] != rank]
                graph[item] = computed + [brought[action] for action in received]
                computed = [item]
    return graph


def _overlap(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The time in which any of `some`, which are apart, runs beside any of `others`."""
    return sum(
        max(0.0, min(end, close) - max(start, begin))
        for begin, close in _merged(others)
        for start, end in some
        if start < close and begin < end
    )


def _merged(spans: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Spans apart that cover the same time."""
    moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    open_spans, begun = 0, 0.0
    for moment, change in moments:
        if not open_spans:
            begun = moment
        open_spans += change
        if not open_spans:
            yield begun, moment
