"""Changes of an order that shorten it: W moved into gaps, and neighbours swapped where the step's length hangs on them.

None of them changes the order of a stage's micro-batches, and all obey the limits of memory.
"""

from collections.abc import Iterator, Sequence
from random import Random

from megalite.schedule.problem import SLACK, B, F, I, Order, Problem, TimedStep, W

MEMORY = 20  # a swap may lengthen the order, but not beyond what it was so many swaps ago (Burke and Bykov 2017)


def refilled(problem: Problem, orders: Sequence[Order], gap: float) -> list[Order]:
    """The orders with each W in the first gap that has room for its time, times `gap`, and the others at the end.

    Gaps are those of the orders without W. Where a limit would be exceeded, W go before.
    """
    bare = [[code for code in order if code & 3 != W] for order in orders]
    run = problem.run(bare)
    if run is None:
        return list(orders)
    return [_refill(problem, rank, order, run.spans[rank], gap) for rank, order in enumerate(bare)]


def _refill(problem: Problem, rank: int, bare: Order, spans: Sequence[tuple[float, float]], gap: float) -> Order:
    found: Order = []
    waiting: list[int] = []  # cells of W, the oldest first
    held, done, shift = 0.0, 0, 0.0  # shift: how much later the rank is than without W
    most = problem.limits[rank] * SLACK
    before = 0.0  # the end of the action before
    for code, (start, end) in zip(bare, spans, strict=True):
        cell, kind = code >> 2, code & 3
        stage = cell // problem.m
        idle = start - before
        change = problem.changes[stage][kind]
        while done < len(waiting):
            oldest = waiting[done] // problem.m
            time = problem.times[oldest][W]
            fits = idle - shift >= gap * time
            if not fits and held + change <= most and not (kind == B and stage in _stages(problem, waiting[done:])):
                break
            found.append(4 * waiting[done] + W)
            held += problem.changes[oldest][W]
            done += 1
            shift += time
        shift = max(0.0, shift - idle)
        found.append(code)
        held += change
        before = end
        if kind == I:
            waiting.append(cell)
    return [*found, *(4 * cell + W for cell in waiting[done:])]


def _stages(problem: Problem, cells: Sequence[int]) -> set[int]:
    return {cell // problem.m for cell in cells}


def fused(problem: Problem, orders: Sequence[Order]) -> list[Order]:
    """The orders with a whole backward wherever a W follows its own I, if the backward takes no longer than both.

    Where a W takes no time at all, it is done with its I wherever it stands.
    """
    cheap = [costs.backward <= (costs.input + costs.weight) * SLACK for costs in problem.stages]
    free = [costs.backward <= costs.input for costs in problem.stages]

    def one(order: Order) -> Iterator[int]:
        done = -1  # the W that has been fused last
        for code, after in zip(order, [*order[1:], -1], strict=True):
            stage, kind = (code >> 2) // problem.m, code & 3
            if kind == I and (free[stage] or (cheap[stage] and after == code - I + W)):
                done = code - I + W
                yield code - I + B
            elif code != done and not (kind == W and free[stage]):
                yield code

    return [list(one(order)) for order in orders]


def swapped(problem: Problem, orders: Sequence[Order], tries: int) -> list[Order]:
    """The shortest of the orders that `tries` swaps of neighbours lead to, one after the other.

    Only neighbours on the longest path through the step are swapped: no other swap can shorten it. Which ones is drawn
    from a generator with a fixed seed, so the result is the same everywhere.
    """
    random = Random(0)
    now = [list(order) for order in orders]
    run = problem.run(now)
    if run is None:
        return now
    length = max(run.ends)
    best, shortest = [list(order) for order in now], length
    past = [length] * MEMORY
    for turn in range(tries):
        pairs = _critical(problem, now, run)
        if not pairs or shortest <= problem.bound * SLACK:
            break
        rank, at = random.choice(pairs)
        order = now[rank]
        if not _may_swap(problem, rank, order, at):
            continue
        order[at], order[at + 1] = order[at + 1], order[at]
        changed = problem.run(now)
        new = max(changed.ends) if changed else None
        if changed and new is not None and new <= max(length, past[turn % MEMORY]):
            run, length = changed, new
        else:
            order[at], order[at + 1] = order[at + 1], order[at]
        past[turn % MEMORY] = length
        if length < shortest:
            best, shortest = [list(order) for order in now], length
    return best


def _critical(problem: Problem, orders: Sequence[Order], run: TimedStep) -> list[tuple[int, int]]:
    """Places (rank, at) on a longest path where the action at `at + 1` starts because the one at `at` has ended."""
    where = {
        code - I + B if code & 3 == I else code: (rank, at)
        for rank, order in enumerate(orders)
        for at, code in enumerate(order)
    }
    spans, rank = run.spans, run.ends.index(max(run.ends))
    at, found = len(orders[rank]) - 1, list[tuple[int, int]]()
    while True:
        start, code = spans[rank][at][0], orders[rank][at]
        if at and spans[rank][at - 1][1] == start:
            at -= 1
            found.append((rank, at))
            continue
        kind, cell = code & 3, code >> 2
        stage = cell // problem.m
        if kind == F and stage:
            rank, at = where[(cell - problem.m) << 2]
        elif kind in (B, I) and stage < len(problem.stages) - 1:
            rank, at = where[(cell + problem.m) << 2 | B]
        else:
            return found


def _may_swap(problem: Problem, rank: int, order: Order, at: int) -> bool:
    """Return whether the actions at `at` and `at + 1` of a rank may change places."""
    first, second = order[at], order[at + 1]
    one, other = first & 3, second & 3
    same = (first >> 2) // problem.m == (second >> 2) // problem.m
    if same and (first >> 2 == second >> 2 or one == other or {one, other} in ({B, I}, {B, W})):
        return False
    changes = problem.changes
    before = sum(changes[(code >> 2) // problem.m][code & 3] for code in order[:at])
    return before + changes[(second >> 2) // problem.m][other] <= problem.limits[rank] * SLACK
