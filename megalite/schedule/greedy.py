"""One order of a pipeline, made on a clock: whenever a rank is free, a policy chooses what it does next.

The idea is that of the automatic scheduler of the zero-bubble paper (Qi et al. 2023, arXiv 2401.10241 §3.1): as many
forwards ahead as memory and policy allow, then forwards and backwards in turn, and W where a rank would idle or needs
its memory. Stages take their micro-batches in order, so gradients are accumulated in one order under every policy.

No order of this kind can be stuck. A rank starts a forward only if there is still room for one micro-batch in all of
its later stages. So the foremost micro-batch always gets on. Memory that waits for a W can always be freed by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from megalite.schedule.problem import SLACK, B, F, I, Order, Problem, W

MIN_W_RATIO = 0.01  # a W that is this much shorter than its I fills no gap, so backward stays whole
Prefer = Literal["backward", "forward", "alternate"]


@dataclass(frozen=True)
class Policy:
    """Rules by which a free rank chooses among the actions that could start."""

    ahead: tuple[int, ...]  # by rank: how many micro-batches its first stage may have between F and backward
    prefer: Prefer = "backward"  # where both a forward and a backward could start
    gap: float = 1.0  # start W if its time, times this, passes before the next known input arrives
    lag: float = math.inf  # number of W that may wait before one goes before a forward
    patience: float = 0.0  # a forward waits for a backward that could start within its time, times this
    deep: bool = True  # last stage of a rank goes first; else the first one
    split: bool = True  # backward into I and W; else whole


def arrange(problem: Problem, policy: Policy) -> list[Order]:
    """The order of every rank under `policy`. It obeys the problem's limits, which must be at least its `least`."""
    return _Clock(problem, policy).run()


def round_trips(problem: Problem, factor: float) -> tuple[int, ...]:
    """By rank: how many micro-batches start in `factor` times the time that one takes from its first stage back to it.

    A micro-batch starts whenever the slowest rank has finished one. With fewer ahead, ranks wait for backward.
    """
    cycle = max(sum(sum(problem.times[s][k] for k in (F, I, W)) for s in stages) for stages in problem.owned)
    found = []
    for stages in problem.owned:
        after = range(stages[0] + 1, len(problem.stages))
        away = sum(
            problem.times[s][F] + problem.times[s][I] + problem.delay_forward[s] + problem.delay_backward[s - 1]
            for s in after
        )
        found.append(1 + math.ceil(factor * away / cycle))
    return tuple(found)


class _Clock:
    """A step while it is arranged."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy, m = problem, policy, problem.m
        stages = len(problem.stages)
        self.forwards, self.backwards, self.weights = [0] * stages, [0] * stages, [0] * stages  # done, by stage
        self.arrived = [[math.inf] * m for _ in range(stages)]  # when the input of F is there; inf: not known yet
        self.returned = [[math.inf] * m for _ in range(stages)]  # when that of backward is
        self.arrived[0] = [0.0] * m
        self.held = [0.0] * problem.ranks
        self.free = [0.0] * problem.ranks
        self.waiting: list[list[int]] = [[] for _ in range(problem.ranks)]  # stages of W that wait, the oldest first
        self.last = [B] * problem.ranks  # the kind of the last forward or backward
        self.orders: list[Order] = [[] for _ in range(problem.ranks)]
        # Before a forward there must be room for one micro-batch in its stage and in all later stages of the rank.
        self.room = [
            sum(problem.stages[other].kept for other in problem.owned[rank] if other >= stage)
            for stage, rank in enumerate(problem.placement)
        ]
        self.splits = [policy.split and costs.weight >= MIN_W_RATIO * costs.input for costs in problem.stages]
        self.most = [limit * SLACK for limit in problem.limits]
        self.events = [(0.0, rank) for rank in range(problem.ranks)]

    def run(self) -> list[Order]:
        heapify(self.events)
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free[rank]:
                self._next(rank, now)
        return self.orders

    def _next(self, rank: int, now: float) -> None:
        """Start what the policy chooses, if anything can start."""
        policy, stages = self.policy, self.problem.owned[rank]
        forward = backward = -1
        soon = math.inf  # when the next input arrives of which is known
        soon_back = math.inf
        for stage in stages if policy.deep else reversed(stages):
            at, done = self.forwards[stage], self.backwards[stage]
            if at < self.problem.m and self._may_start(rank, stage):
                when = self.arrived[stage][at]
                if when <= now:
                    forward = stage
                elif when < soon:
                    soon = when
            if done < at:
                when = self.returned[stage][done]
                if when <= now:
                    backward = stage
                elif when < soon_back:
                    soon_back = when
        if backward >= 0 and (forward < 0 or self._backward_first(rank)):
            self._backward(rank, backward, now)
        elif forward >= 0:
            late = len(self.waiting[rank]) > policy.lag
            patient = soon_back - now < policy.patience * self.problem.times[forward][F]
            if late:
                self._weight(rank, now)
            elif not patient:
                self._start(rank, forward, F, now)
            elif self.waiting[rank] and self._passes(rank, now, soon_back):
                self._weight(rank, now)
        elif self.waiting[rank] and self._passes(rank, now, min(soon, soon_back)):
            self._weight(rank, now)

    def _may_start(self, rank: int, stage: int) -> bool:
        """Return whether the policy, and memory, let a forward start."""
        first = self.problem.owned[rank][0]
        if stage == first and self.forwards[stage] - self.backwards[stage] >= self.policy.ahead[rank]:
            return False
        return self.held[rank] + self.room[stage] <= self.most[rank]

    def _backward_first(self, rank: int) -> bool:
        prefer = self.policy.prefer
        return prefer == "backward" or (prefer == "alternate" and self.last[rank] == F)

    def _passes(self, rank: int, now: float, until: float) -> bool:
        """Return whether a W may fill the time from `now` to `until`."""
        return now + self.policy.gap * self.problem.times[self.waiting[rank][0]][W] <= until * SLACK

    def _backward(self, rank: int, stage: int, now: float) -> None:
        """Start the backward of a stage, whole where there is no memory for I; the W before a whole one go first."""
        costs, waits = self.problem.stages[stage], stage in self.waiting[rank]
        splits = self.splits[stage] and self.held[rank] + costs.waiting - costs.kept <= self.most[rank]
        if splits:
            self._start(rank, stage, I, now)
        elif waits:  # gradients are accumulated in the order of micro-batches
            self._weight(rank, now)
        else:
            self._start(rank, stage, B, now)

    def _weight(self, rank: int, now: float) -> None:
        self._start(rank, self.waiting[rank][0], W, now)

    def _start(self, rank: int, stage: int, kind: int, now: float) -> None:
        problem = self.problem
        count = (self.forwards, self.backwards, self.backwards, self.weights)[kind]
        micro = count[stage]
        count[stage] += 1
        self.orders[rank].append(4 * (stage * problem.m + micro) + kind)
        self.held[rank] += problem.changes[stage][kind]
        end = self.free[rank] = now + problem.times[stage][kind]
        heappush(self.events, (end, rank))
        if kind == W:
            self.waiting[rank].pop(0)
            return
        self.last[rank] = F if kind == F else B
        if kind == F:
            if stage == len(problem.stages) - 1:
                self.returned[stage][micro] = end
            else:
                self._tell(self.arrived, stage + 1, micro, end + problem.delay_forward[stage + 1])
            return
        if kind == I:
            self.waiting[rank].append(stage)
        else:
            self.weights[stage] += 1
        if stage:
            self._tell(self.returned, stage - 1, micro, end + problem.delay_backward[stage - 1])

    def _tell(self, inputs: Sequence[list[float]], stage: int, micro: int, when: float) -> None:
        """Note when an input arrives, and wake the rank that takes it."""
        inputs[stage][micro] = when
        heappush(self.events, (when, self.problem.placement[stage]))
