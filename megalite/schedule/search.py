"""An order for the very costs and the memory of a pipeline: the best named schedule, or a better one.

This is the idea of the automatic scheduler of the zero-bubble paper (Qi et al. 2023, arXiv 2401.10241 §3.1). Orders are
made greedily under many policies (`greedy`), the best is changed as long as that shortens it (`improve`), and whatever
takes the least simulated time is returned. The named schedules are among the candidates. So the result is never worse
than any of them that obeys the memory limits.

Nothing here is random or timed: the same input gives the same order on every rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.base.errors import InputError
from megalite.schedule.actions import Orders
from megalite.schedule.generate import AUTO_SCHEDULE, ONE_STAGE_SCHEDULES, V_SCHEDULES, placement_of
from megalite.schedule.greedy import Policy, arrange, round_trips
from megalite.schedule.improve import fused, refilled, swapped
from megalite.schedule.orders import interleaved
from megalite.schedule.problem import SLACK, Beside, Order, Problem, StageCosts, W

EFFORT = 400_000  # actions that a search arranges or runs, all orders together; it sees about 500,000 in a second
MIN_POLICIES = 4  # policies that are tried whatever the effort
SWAPS = 40  # swaps that effort is left for; a quarter of the effort where they would take more
GAPS = (1.0, 0.5, 0.0)
FACTORS = (1.0, 1.5, 2.0)


@dataclass(frozen=True)
class FoundOrder:
    """The order that a search has found, and what it is compared with. Times are in the unit of the costs."""

    orders: Orders
    makespan: float
    name: str  # named schedule that it is, or "auto"
    named: Mapping[str, float]  # the makespans of the named schedules that obey the limits
    bound: float  # no order takes less

    @property
    def best_named(self) -> str | None:
        """The fastest named schedule that obeys the limits; None if none does."""
        return min(self.named, key=self.named.__getitem__, default=None)


def search(
    placement: Sequence[int],
    m: int,
    stages: Sequence[StageCosts],
    limits: Sequence[float] | None = None,
    transfer: float = 0.0,
    splits: bool = True,
    beside: Beside | None = None,
) -> FoundOrder:
    """The fastest order found for m micro-batches on stages that are placed like those of a named schedule.

    placement: stage -> the rank that owns it, as `placement_of` has it. stages: their times and memory for one
    micro-batch. limits: by rank, the memory that it may hold between actions; None: no limit. transfer: time from the
    end of an action until its result is on another rank; it overlaps with compute. splits: whether backward may be
    split into I and W. beside: what runs beside compute; None: nothing. Raises InputError if a rank cannot hold even
    one micro-batch.
    """
    ranks = max(placement) + 1
    bounds = tuple(limits) if limits is not None else (float("inf"),) * ranks
    problem = Problem(tuple(placement), m, tuple(stages), bounds, transfer, splits, beside)
    _refuse_too_little(problem)
    best = _Best(problem)
    coded = {name: problem.coded(orders) for name, orders in _named(problem)}
    named = {}
    for name in sorted(coded, key=lambda name: max(problem.peaks(coded[name]))):  # leanest first, as it wins a tie
        orders = coded[name]
        if problem.fits(orders) and (splits or not any(code & 3 == W for order in orders for code in order)):
            named[name] = best.offer(orders, name)
    if not best.is_perfect:
        _try_policies(best)
        _improve(best)
        _fuse(best)
    return FoundOrder(problem.decoded(best.orders), best.makespan, best.name, named, problem.bound)


def least_memory(placement: Sequence[int], stages: Sequence[StageCosts]) -> list[float]:
    """By rank: the lowest limit with which `search` finds an order."""
    return Problem(tuple(placement), 1, tuple(stages), (), 0.0, False).least


def memory_of(orders: Orders, placement: Sequence[int], m: int, stages: Sequence[StageCosts]) -> list[float]:
    """By rank: the most memory that it holds between two actions of its order."""
    problem = Problem(tuple(placement), m, tuple(stages), (), 0.0, True)
    return problem.peaks(problem.coded(orders))


def _refuse_too_little(problem: Problem) -> None:
    for rank, (least, limit) in enumerate(zip(problem.least, problem.limits, strict=True)):
        if least > limit * SLACK:
            raise InputError(
                f"no order of a pipeline fits: rank {rank} may hold {limit:g}, {least - limit:g} less than the "
                f"{least:g} that one micro-batch takes"
            )


def _named(problem: Problem) -> Iterator[tuple[str, Orders]]:
    """The named schedules that place stages as the problem does."""
    p, m, v = problem.ranks, problem.m, len(problem.stages) // problem.ranks
    for name, orders in {**ONE_STAGE_SCHEDULES, **V_SCHEDULES}.items():
        if problem.placement == placement_of(name, p, 2 if name in V_SCHEDULES else 1):
            yield name, orders(p, m)
    if v > 1 and problem.placement == placement_of("interleaved_1f1b", p, v):
        yield "interleaved_1f1b", interleaved(p, m, v)


class _Best:
    """The best order so far, and the effort that is left."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.makespan, self.name = float("inf"), ""
        self.orders: list[Order] = []
        self.left = float(EFFORT)
        self.size = 3 * problem.m * len(problem.stages)

    @property
    def is_perfect(self) -> bool:
        return self.makespan <= self.problem.bound * SLACK

    @property
    def is_done(self) -> bool:
        return self.is_perfect or self.left < self.size

    def offer(self, orders: list[Order], name: str = AUTO_SCHEDULE) -> float:
        """Take the orders if they are faster than all before. Returns their makespan."""
        self.left -= self.size
        makespan = self.problem.makespan(orders)
        if makespan < self.makespan / (SLACK if self.orders else 1):
            self.makespan, self.orders, self.name = makespan, orders, name
        return makespan


def _try_policies(best: _Best) -> None:
    """Change one part of the best policy at a time, until no change of it helps or the effort is spent."""
    problem = best.problem
    tried: dict[Policy, float] = {}

    def time_of(policy: Policy) -> float:
        if policy not in tried:
            best.left -= 2 * best.size  # to arrange takes longer than to run
            tried[policy] = best.offer(arrange(problem, policy))
        return tried[policy]

    ahead = [round_trips(problem, factor) for factor in FACTORS] + [(problem.m,) * problem.ranks]
    first = Policy(ahead[0], split=problem.splits)
    starts = [replace(first, ahead=caps, prefer=prefer) for caps in ahead for prefer in ("backward", "alternate")]
    for policy in starts:
        if best.is_perfect or (best.is_done and len(tried) >= MIN_POLICIES):
            return
        time_of(policy)
    options: dict[str, Sequence[Any]] = {
        "ahead": [*ahead, *(tuple(1 + cap for cap in caps) for caps in ahead[:1])],
        "prefer": ["backward", "alternate", "forward"],
        "gap": GAPS if problem.splits else (1.0,),
        "lag": (float("inf"), 0, 2) if problem.splits else (float("inf"),),
        "patience": (0.0, 0.3, 0.7),
        "deep": (True, False) if len(problem.stages) > problem.ranks else (True,),
        "split": (True, False) if problem.splits else (False,),
    }
    now = min(tried, key=tried.__getitem__)
    while True:
        before = tried[now]
        for part, values in options.items():
            for value in values:
                if best.left < min(SWAPS * best.size, EFFORT / 4) or best.is_perfect:  # the rest is for improvements
                    return
                time_of(replace(now, **{part: value}))
            now = min(tried, key=tried.__getitem__)
        if tried[now] >= before:
            return


def _improve(best: _Best) -> None:
    """Shorten the best orders."""
    problem = best.problem
    if problem.splits:
        for gap in GAPS:
            if not best.is_done:
                best.offer(refilled(problem, best.orders, gap))
    tries = int(best.left // best.size)
    if tries > 0 and not best.is_perfect:
        best.offer(swapped(problem, best.orders, tries))


def _fuse(best: _Best) -> None:
    """Leave backward whole where that costs no time: it takes less memory, and fewer kernels."""
    if best.name != AUTO_SCHEDULE or not best.problem.splits:
        return
    whole = fused(best.problem, best.orders)
    first = best.problem.placement[0]  # nobody waits for the gradient of the first stage's input
    for ranks in (range(best.problem.ranks), (first,)):
        orders = [whole[rank] if rank in ranks else order for rank, order in enumerate(best.orders)]
        makespan = best.problem.makespan(orders)
        if makespan <= best.makespan:
            best.makespan, best.orders = makespan, orders
            return
