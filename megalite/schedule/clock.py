"""A schedule prepared to be timed again and again with other costs. It gives the same times as `schedule.simulate`."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from megalite.schedule.actions import COMPUTE, Action, Kind, Table, pairs_of
from megalite.schedule.simulate import UNIT, execute

NO_STEP = 0  # number that stands for no step, where none is waited for: it ended at 0
NO_PAIR = -1
Class = TypeVar("Class", bound=Hashable)
Timed = tuple[Kind, int, int, int]  # an action, and the number of its class


class Clock(Generic[Class]):
    """Actions in an order in which each follows those that it waits for.

    orders: compute and sharding of every rank. placement: by stage, its rank. classes: names that all actions of equal
    cost share, by number. paired: as in `Table`. Raises InputError if the orders cannot make progress.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Timed]],
        placement: Sequence[int],
        m: int,
        classes: Sequence[Class],
        paired: bool = False,
    ) -> None:
        self.classes = classes
        self._steps: list[tuple[int, int, int, int]] = []  # steps it follows: on its rank, beside it, from afar; class
        ranks, stages = range(len(orders)), len(placement)
        forwards, backwards = [NO_STEP] * (stages * m), [NO_STEP] * (stages * m)  # the steps that make them
        awaited: dict[tuple[bool, int], int] = {}  # forward or backward, and which -> the rank that waits for it
        gathered: dict[int, int] = {}  # by stage: the step that gathers it, until it is used
        self._computed, self._sent, done = [NO_STEP for _ in ranks], [NO_STEP for _ in ranks], [0 for _ in ranks]
        ready, add, count = list(reversed(ranks)), self._steps.append, 0
        first, last, gather = Kind.F, Kind.W, Kind.GATHER  # looking up a member of an enum takes longer than a name
        nothing = len(classes)  # number of a step that takes no time
        while ready:
            rank = ready.pop()
            order, before = orders[rank], self._computed[rank]
            begun = NO_PAIR  # F of a pair whose B comes next
            for position in range(done[rank], len(order)):
                kind, stage, micro, number = order[position]
                if kind not in COMPUTE:
                    add((before, self._sent[rank], NO_STEP, number))
                    self._sent[rank] = count = count + 1
                    if kind is gather:
                        gathered[stage] = count
                    continue
                at, source = stage * m + micro, NO_STEP
                forward = kind is first
                if forward:
                    if stage:
                        source, neighbour = forwards[at - m], stage - 1
                        if source is NO_STEP:
                            awaited[True, at - m] = rank
                            break
                elif kind is last:
                    if backwards[at] is NO_STEP:
                        break
                else:
                    if forwards[at] is NO_STEP:
                        break
                    if stage + 1 < stages:
                        source, neighbour = backwards[at + m], stage + 1
                        if source is NO_STEP:
                            awaited[False, at + m] = rank
                            break
                far = source if source and placement[neighbour] != rank else NO_STEP
                if forward and paired and (other := _paired(order, position)) is not None:
                    source, neighbour = NO_STEP, other[1] + 1
                    if neighbour < stages:
                        source = backwards[neighbour * m + other[2]]
                        if source is NO_STEP:
                            awaited[False, neighbour * m + other[2]] = rank
                            break
                    add((before, gathered.pop(stage, NO_STEP) if gathered else NO_STEP, far, nothing))
                    before = count = count + 1
                    begun, far = at, source if source and placement[neighbour] != rank else NO_STEP
                    add((before, NO_STEP, far, number))
                    before = count = count + 1
                    continue
                add((before, gathered.pop(stage, NO_STEP) if gathered else NO_STEP, far, number))
                before = count = count + 1
                if kind is not last:
                    (forwards if forward else backwards)[at] = count
                    if (waits := awaited.pop((forward, at), None)) is not None:
                        ready.append(waits)
                if begun != NO_PAIR:  # its result is there as well
                    forwards[begun] = count
                    if (waits := awaited.pop((True, begun), None)) is not None:
                        ready.append(waits)
                    begun = NO_PAIR
            else:
                position = len(order)
            done[rank], self._computed[rank] = position, before
        if any(done[rank] < len(order) for rank, order in enumerate(orders)):
            _refuse(orders, placement, paired)

    def run(self, costs: Sequence[float], transfer: float) -> tuple[float, float]:
        """The end of the last action, and that of the last compute.

        costs: of `classes`, in that order. transfer: as in `simulate`.
        """
        ends, costs = [0.0], [*costs, 0.0]
        ended = ends.append
        for before, beside, far, number in self._steps:
            start = ends[before]
            if beside and ends[beside] > start:
                start = ends[beside]
            if far and ends[far] + transfer > start:
                start = ends[far] + transfer
            ended(start + costs[number])
        computed = max(ends[last] for last in self._computed)
        return max(computed, *(ends[last] for last in self._sent)), computed

    def longest(self, costs: Sequence[float], transfer: float) -> tuple[list[int], int]:
        """A chain of actions that wait for each other, and of which the last ends last.

        Returns how many of each of `classes` are in it, and how many transfers. Under other costs, a step takes at
        least as long as this chain.
        """
        ends, chosen, costs = [0.0], [NO_STEP], [*costs, 0.0]
        for before, beside, far, number in self._steps:
            start, after = ends[before], before
            if beside and ends[beside] > start:
                start, after = ends[beside], beside
            if far and ends[far] + transfer > start:
                start, after = ends[far] + transfer, -far  # moved to another rank
            ends.append(start + costs[number])
            chosen.append(after)
        found, transfers = [0] * len(costs), 0
        last = max(*self._computed, *self._sent, key=ends.__getitem__)
        while last != NO_STEP:
            found[self._steps[last - 1][3]] += 1
            last = chosen[last]
            transfers += last < 0
            last = abs(last)
        return found[:-1], transfers


def _refuse(orders: Sequence[Sequence[Timed]], placement: Sequence[int], paired: bool) -> None:
    """Raises InputError, which shows who waits for whom, for orders that cannot make progress."""
    actions = [[Action(*action[:3]) for action in order] for order in orders]
    compute = [[action for action in order if action.is_compute] for order in actions]
    execute(actions, placement, lambda action: UNIT.get(action.kind, 0), pairs=pairs_of(compute) if paired else {})


def _paired(order: Sequence[Timed], position: int) -> Timed | None:
    """The B beside which the F at a position is computed, as `pairs_of` has them."""
    after = order[position + 1] if position + 1 < len(order) else None
    return after if after is not None and after[0] is Kind.B and after[1] != order[position][1] else None


def clock_of(table: Table, of: Callable[[Action], Class]) -> Clock[Class]:
    """The clock of a table, which may lack its transfers. of: by action, a name that actions of equal cost share."""
    numbers: dict[Class, int] = {}
    orders = [
        [(*item, numbers.setdefault(of(item), len(numbers))) for item in program if isinstance(item, Action)]
        for program in table.programs
    ]
    return Clock(orders, table.placement, table.micro_batches, list(numbers), table.paired)
