"""Input of a search for a pipeline order, and the time and memory of an order under it.

A search tries thousands of orders. So actions are whole numbers here: `4 · (stage · m + micro) + kind`, with the kinds
0 to 3 for F, B, I and W. `simulate` and `check` know only Actions; a search hands its result over as such.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.schedule.actions import COMPUTE, Action, Orders, Times
from megalite.schedule.simulate import COLUMN

F, B, I, W = range(4)  # noqa: E741 - the kinds of coded actions, in the order of COMPUTE

SLACK = 1 + 1e-9  # sums of floats in another order may differ by so much
Order = list[int]  # coded actions of one rank
Spans = list[list[tuple[float, float]]]  # by rank: start and end of every action of its order


@dataclass(frozen=True)
class StageCosts:
    """Times of one stage for one micro-batch, in any unit, and the memory that it holds, in any other unit.

    Memory is counted between actions: what an action needs only while it runs is not in it.
    """

    forward: float  # time of F
    backward: float  # time of B
    input: float  # time of I
    weight: float  # time of W
    kept: float = 0.0  # memory from F until B or I
    waiting: float = 0.0  # memory from I until W

    @property
    def times(self) -> tuple[float, float, float, float]:
        """Times of F, B, I and W."""
        return self.forward, self.backward, self.input, self.weight


Pair = tuple[float, float]  # with a reduction over the shards alone, and with one that replicas sum up, too


@dataclass(frozen=True)
class Beside:
    """Collectives of data-parallel ranks beside the compute of a pipeline, as `communication.add_sharding` places them.

    A rank has one collective at a time. Each tuple is by stage, in the unit of StageCosts. gathers: the weights of a
    stage, from one action before its first; None: not as actions of their own. each: gradients are reduced after every
    backward, not only after the last of a step. slower: by how much a B takes longer with its reduction beside it.
    after_split: how long the reduction takes that follows a W.
    """

    gathers: tuple[float, ...] | None
    each: bool
    slower: tuple[Pair, ...]
    after_split: tuple[Pair, ...]


class TimedStep(NamedTuple):
    """A step on the clock: when every action runs, and by rank the end of its last action or collective."""

    spans: Spans
    ends: list[float]


@dataclass(frozen=True)
class Problem:
    """A pipeline of `m` micro-batches, whose order is to be found.

    placement: stage -> the rank that owns it. limits: by rank, the memory that it may hold. transfer: time from the end
    of an action until its result is on another rank. splits: whether backward may be split into I and W. beside: None:
    no collectives.
    """

    placement: tuple[int, ...]
    m: int
    stages: tuple[StageCosts, ...]
    limits: tuple[float, ...]
    transfer: float
    splits: bool
    beside: Beside | None = None

    @cached_property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def owned(self) -> list[list[int]]:
        """By rank: its stages, ascending."""
        return [[s for s, owner in enumerate(self.placement) if owner == rank] for rank in range(self.ranks)]

    @cached_property
    def times(self) -> Times:
        """By stage: the times of F, B, I and W."""
        return tuple(costs.times for costs in self.stages)

    @cached_property
    def changes(self) -> list[tuple[float, float, float, float]]:
        """By stage: how F, B, I and W change the memory that its rank holds."""
        return [(c.kept, -c.kept, c.waiting - c.kept, -c.waiting) for c in self.stages]

    @cached_property
    def delay_forward(self) -> list[float]:
        """By stage: how long the output of the stage before it travels."""
        return [0.0, *(self.transfer * (a != b) for a, b in zip(self.placement, self.placement[1:], strict=False))]

    @cached_property
    def delay_backward(self) -> list[float]:
        """By stage: how long the gradient from the stage after it travels."""
        return [*self.delay_forward[1:], 0.0]

    @cached_property
    def least(self) -> list[float]:
        """By rank: the least memory with which any order runs, that of one micro-batch after the other."""
        return [sum(self.stages[stage].kept for stage in owned) for owned in self.owned]

    @cached_property
    def bound(self) -> float:
        """A time that no order falls below: ranks wait for their first input, and compute all of their work.

        Nor does a step take less than one micro-batch on its way through all stages and back.
        """
        way = self.transfer * sum(a != b for a, b in zip(self.placement, self.placement[1:], strict=False))
        back = [min(costs.backward, costs.input) if self.splits else costs.backward for costs in self.stages]
        longest = sum(costs.forward for costs in self.stages) + sum(back) + 2 * way
        for stages in self.owned:
            head = sum(self.stages[s].forward + self.delay_forward[s + 1] for s in range(stages[0]))
            tail = 0.0 if self.splits else sum(back[s] + self.delay_backward[s] for s in range(stages[0]))
            longest = max(longest, head + self.m * sum(map(self._work, stages)) + tail)
        return longest

    def _work(self, stage: int) -> float:
        costs = self.stages[stage]
        whole = costs.backward
        return costs.forward + (min(whole, costs.input + costs.weight) if self.splits else whole)

    def peaks(self, orders: Iterable[Order]) -> list[float]:
        """By rank: the most memory held at once."""
        return [max(self._held(order), default=0.0) for order in orders]

    def fits(self, orders: Iterable[Order]) -> bool:
        """Return whether no rank holds more than its limit."""
        return all(peak <= limit * SLACK for peak, limit in zip(self.peaks(orders), self.limits, strict=True))

    def _held(self, order: Order) -> Iterator[float]:
        held, m, changes = 0.0, self.m, self.changes
        for code in order:
            held += changes[(code >> 2) // m][code & 3]
            yield held

    def run(self, orders: Sequence[Order]) -> TimedStep | None:
        """Run each action as soon as its rank can start it. Returns the times; None if ranks wait for each other."""
        m, last, placement, times, beside = self.m, len(self.stages) - 1, self.placement, self.times, self.beside
        delay_forward, delay_backward = self.delay_forward, self.delay_backward
        cells = m * len(self.stages)
        ended: list[list[float]] = [[-1.0] * cells, [-1.0] * cells]  # ends of F, and of B or I
        spans: Spans = [[] for _ in orders]
        clock, network = [0.0] * len(orders), [0.0] * len(orders)
        blocked: dict[int, int] = {}  # coded F or B -> the rank that waits for it
        gathered = dict[int, float]()  # by stage: when, until it is used
        gathers, final = self._collectives(orders)
        splits = any(len(order) > 2 * m * len(owned) for order, owned in zip(orders, self.owned, strict=True))
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            now, own, order = clock[rank], spans[rank], orders[rank]
            for at in range(len(own), len(order)):
                code = order[at]
                kind, cell = code & 3, code >> 2
                stage = cell // m
                if beside and beside.gathers and (rank, at) in gathers:
                    for other in gathers.pop((rank, at)):
                        network[rank] = gathered[other] = max(now, network[rank]) + beside.gathers[other]
                if kind == F:
                    if stage:
                        there = ended[0][cell - m]
                        if there < 0:
                            blocked[(cell - m) << 2] = rank
                            break
                        now = max(now, there + delay_forward[stage])
                    if gathered:
                        now = max(now, gathered.pop(stage, 0.0))
                elif kind != W and stage < last:
                    there = ended[1][cell + m]
                    if there < 0:
                        blocked[(cell + m) << 2 | B] = rank
                        break
                    now = max(now, there + delay_backward[stage])
                start, now = now, now + times[stage][kind]
                if beside and (kind in (B, W)) and (beside.each or code in final):
                    replicas = splits or code in final
                    if kind == B:
                        now += beside.slower[stage][replicas]
                    else:
                        network[rank] = max(now, network[rank]) + beside.after_split[stage][replicas]
                own.append((start, now))
                if kind == F:
                    ended[0][cell] = now
                    if stage < last and placement[stage + 1] != rank and code in blocked:
                        ready.append(blocked.pop(code))
                elif kind != W:
                    ended[1][cell] = now
                    if stage and placement[stage - 1] != rank and (cell << 2 | B) in blocked:
                        ready.append(blocked.pop(cell << 2 | B))
            clock[rank] = now
        if any(len(own) < len(order) for own, order in zip(spans, orders, strict=True)):
            return None
        return TimedStep(spans, [max(*both) for both in zip(clock, network, strict=True)])

    def _collectives(self, orders: Sequence[Order]) -> tuple[dict[tuple[int, int], list[int]], set[int]]:
        """By rank and place in its order: stages whose weights are gathered from there; and the codes of the actions
        after which gradients of a stage are reduced last in a step."""
        gathers, final = dict[tuple[int, int], list[int]](), set[int]()
        if self.beside is None:
            return gathers, final
        for rank, (order, owned) in enumerate(zip(orders, self.owned, strict=True)):
            firsts = sorted((order.index(4 * self.m * stage + F), stage) for stage in owned)
            for at, stage in firsts if self.beside.gathers else ():
                gathers.setdefault((rank, max(0, at - 1)), []).append(stage)
            left = set(owned)
            for code in reversed(order):
                if code & 3 in (B, W) and (stage := (code >> 2) // self.m) in left:
                    final.add(code)
                    left.discard(stage)
                    if not left:
                        break
        return gathers, final

    def makespan(self, orders: Sequence[Order]) -> float:
        """The end of the last action, or of a collective; infinite if ranks wait for each other."""
        found = self.run(orders)
        return math.inf if found is None else max(found.ends)

    def coded(self, orders: Orders) -> list[Order]:
        """Orders of Actions as whole numbers."""
        return [[4 * (a.stage * self.m + a.micro) + COLUMN[a.kind] for a in order] for order in orders]

    def decoded(self, orders: Sequence[Order]) -> Orders:
        """Orders of whole numbers as Actions."""
        return tuple(tuple(Action(COMPUTE[code & 3], *divmod(code >> 2, self.m)) for code in order) for order in orders)
