"""A schedule prepared to be timed again and again with other costs. It gives the same times as `schedule.simulate`."""

from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from megalite.schedule.actions import SHARDING, Action, Kind, Name, Table
from megalite.schedule.simulate import UNIT, execute

NOTHING = -1
Class = TypeVar("Class", bound=Hashable)


class Clock(Generic[Class]):
    """The actions of `table` in an order in which each follows those that it waits for.

    table: may lack its transfers. of: by action, a name that all actions of equal cost share. Raises InputError if the
    table cannot make progress.
    """

    def __init__(self, table: Table, of: Callable[[Action], Class]) -> None:
        orders = [[item for item in program if isinstance(item, Action)] for program in table.programs]
        self.classes: list[Class] = []
        self._numbers: dict[Class, int] = {}
        self._steps: list[tuple[int, int, int, int, bool]] = []
        placement, stages = table.placement, table.stages
        made: dict[Name, int] = {}  # result -> the index of the action that makes it
        awaited: dict[Name, list[int]] = {}  # result -> ranks that wait for it
        gathered: dict[int, int] = {}  # by stage: the index of the action that gathers it
        computed, sent, done = [NOTHING] * len(orders), [NOTHING] * len(orders), [0] * len(orders)
        ready = list(reversed(range(len(orders))))
        while ready:
            rank = ready.pop()
            for action in islice(orders[rank], done[rank], None):
                index = len(self._steps)
                if action.kind in SHARDING:
                    self._add(computed[rank], sent[rank], NOTHING, of(action), False)
                    sent[rank] = index
                    if action.kind is Kind.GATHER:
                        gathered[action.stage] = index
                else:
                    far = NOTHING
                    sources = action.inputs(stages)
                    if lacking := next((source for source in sources if source not in made), None):
                        awaited.setdefault(lacking, []).append(rank)
                        break
                    for source in sources:
                        if placement[source[1]] != rank:
                            far = made[source]
                    self._add(computed[rank], gathered.get(action.stage, NOTHING), far, of(action), True)
                    computed[rank] = made[action.result] = index
                    ready += awaited.pop(action.result, ())
                done[rank] += 1
        if any(done[rank] < len(order) for rank, order in enumerate(orders)):
            execute(orders, placement, lambda action: UNIT.get(action.kind, 0))  # tells who waits for whom

    def _add(self, before: int, beside: int, far: int, name: Class, computes: bool) -> None:
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self.classes):
            self.classes.append(name)
        self._steps.append((before, beside, far, number, computes))

    def run(self, costs: Sequence[float], transfer: float) -> tuple[float, float]:
        """The end of the last action, and that of the last compute.

        costs: of `classes`, in that order. transfer: as in `simulate`.
        """
        ends: list[float] = []
        computed = 0.0
        for before, beside, far, number, computes in self._steps:
            start = ends[before] if before >= 0 else 0.0
            if beside >= 0 and ends[beside] > start:
                start = ends[beside]
            if far >= 0 and ends[far] + transfer > start:
                start = ends[far] + transfer
            end = start + costs[number]
            ends.append(end)
            if computes and end > computed:
                computed = end
        return max(ends), computed

    def longest(self, costs: Sequence[float], transfer: float) -> tuple[list[int], int]:
        """A chain of actions that wait for each other, and of which the last compute ends last.

        Returns how many of each of `classes` are in it, and how many transfers. Under other costs, a step takes at
        least as long as this chain.
        """
        ends, chosen = list[float](), list[tuple[int, bool]]()
        last = NOTHING
        for index, (before, beside, far, number, computes) in enumerate(self._steps):
            waits = [(ends[at], at, False) for at in (before, beside) if at >= 0]
            if far >= 0:
                waits.append((ends[far] + transfer, far, True))
            start, at, moves = max(waits, default=(0.0, NOTHING, False))
            ends.append(start + costs[number])
            chosen.append((at, moves))
            if computes and (last < 0 or ends[index] > ends[last]):
                last = index
        found, transfers = [0] * len(self.classes), 0
        while last >= 0:
            found[self._steps[last][3]] += 1
            last, moves = chosen[last]
            transfers += moves
        return found, transfers
