"""Compute orders of the schedules that split backward, so that weight gradients fill the bubble."""

from collections import deque
from collections.abc import Iterable
from itertools import chain

from megalite.schedule.actions import Action, Kind, Orders


def zb_h1(p: int, m: int) -> Orders:
    """1F1B with postponed weight gradients: a third of its bubble, in its memory (Qi et al., arXiv 2401.10241 §2.2).

    Every rank holds at most min(m, p) stage-activations.
    """
    return _handcrafted(p, m, more=0)


def zb_h2(p: int, m: int) -> Orders:
    """ZB-H1 with more forwards ahead: for m >= 2p − 1 no rank ever waits (Qi et al., arXiv 2401.10241 §2.3).

    Every rank holds at most min(m, 2p − 1) stage-activations. The ramps remain: rank r starts and ends r units late.
    With fewer micro-batches there are fewer forwards ahead; at m = p it is ZB-H1.
    """
    return _handcrafted(p, m, more=max(0, m - p))


def _handcrafted(p: int, m: int, more: int) -> Orders:
    """Rank r starts with p − r forwards, and its weight gradients wait for r others; both by up to `more` more."""

    def order(rank: int) -> list[Action]:
        ahead = min(m, p - rank + min(p - rank - 1, more))
        waiting = rank + min(rank, more)
        work = _Work([rank])
        work.forward(0, ahead)
        for micro in range(m):
            work.input_gradient(0)
            if micro >= waiting:
                work.weight_gradient()
            if ahead + micro < m:
                work.forward(0)
        work.weight_gradient(min(m, waiting))
        return work.actions

    return tuple(tuple(order(rank)) for rank in range(p))


def zbv(p: int, m: int) -> Orders:
    """Two stages per rank in a V: no rank ever waits for m >= 2p − 1, in the memory of 1F1B (arXiv 2405.15362 §3.2).

    Every rank holds at most min(2m, 2p) stage-activations, each half as large as without the V. The ramps remain: rank
    r starts and ends r units late. With fewer micro-batches, the order is the same without the missing ones.
    """

    def order(rank: int, m: int) -> list[Action]:
        work = _Work([rank, 2 * p - 1 - rank])
        work.forward(0, 2 * (p - rank) - 1)
        for _ in range(rank):
            work.forward(1)
            work.forward(0)
        for _ in range(p - rank):
            work.forward(1)
            work.input_gradient(1)
            work.weight_gradient()
        for micro in range(2 * p - rank - 1, m + p - rank - 1):
            if micro < m:
                work.forward(0)
            work.input_gradient(0)
            work.weight_gradient()
            work.forward(1)
            work.input_gradient(1)
            work.weight_gradient()
        for _ in range(rank):
            work.input_gradient(0)
            work.input_gradient(1)
        for _ in range(p - rank):
            work.input_gradient(0)
            work.weight_gradient()
        work.weight_gradient(2 * rank)
        return work.actions

    return tuple(_up_to(m, order(rank, max(m, 2 * p - 1))) for rank in range(p))


def dualpipev(p: int, m: int) -> Orders:
    """Forward and backward of different micro-batches side by side, in a V (DualPipe, arXiv 2412.19437 §3.2.1, halved).

    In the steady state, a forward of one of a rank's stages is followed by a backward of the other. Neither depends on
    the other, so the communication inside one can overlap with the compute of the other. Every rank holds at most
    min(2m, 2p + 1) stage-activations. It is made for m >= 2p; with fewer micro-batches, the order is the same without
    the missing ones.
    """

    def order(rank: int, m: int) -> list[Action]:
        inner = p - rank - 1  # ranks between this one and the turn of the V
        work = _Work([rank, 2 * p - 1 - rank])
        work.forward(0, 2 * inner)
        for _ in range(rank + 1):
            work.forward(0)
            work.forward(1)
        for _ in range(inner):
            work.input_gradient(1)
            work.weight_gradient()
            work.forward(1)
        work.in_turn(m - 2 * p + rank + 1, (Kind.F, 0), (Kind.B, 1), (Kind.F, 1), (Kind.B, 0))
        for _ in range(inner):
            work.backward(1)
            work.forward(1)
            work.backward(0)
        for index in range(2 * (rank + 1)):
            if index <= rank:
                work.backward((index + 1) % 2)
            else:
                work.input_gradient((index + 1) % 2)
        for _ in range(inner):
            work.weight_gradient()
            work.input_gradient(0)
        work.weight_gradient(rank + 1)
        return work.actions

    return tuple(_up_to(m, order(rank, max(m, 2 * p))) for rank in range(p))


class _Work:
    """A rank's order while it is made. Every stage takes its micro-batches in turn."""

    def __init__(self, stages: list[int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._forwards, self._backwards = [0] * len(stages), [0] * len(stages)  # micro-batches so far
        self._waiting: deque[Action] = deque()  # weight gradients, the oldest first

    def forward(self, which: int, times: int = 1) -> None:
        """Append F on the rank's stage number `which`."""
        self.actions += self._next(Kind.F, which, times)

    def backward(self, which: int) -> None:
        """Append B."""
        self.actions += self._next(Kind.B, which)

    def in_turn(self, times: int, *each: tuple[Kind, int]) -> None:
        """Append F and B of `each` kind and stage in turn, so many times."""
        self.actions += chain.from_iterable(zip(*(self._next(*one, times) for one in each), strict=True))

    def input_gradient(self, which: int) -> None:
        """Append I; its W joins those that wait."""
        (gradient,) = self._next(Kind.I, which)
        self.actions.append(gradient)
        self._waiting.append(Action(Kind.W, gradient.stage, gradient.micro))

    def weight_gradient(self, times: int = 1) -> None:
        """Append the W that has waited longest."""
        self.actions += [self._waiting.popleft() for _ in range(times)]

    def _next(self, kind: Kind, which: int, times: int = 1) -> list[Action]:
        """The actions of the next micro-batches."""
        stage, done = self._stages[which], self._forwards if kind is Kind.F else self._backwards
        begin, done[which] = done[which], done[which] + times
        return [Action(kind, stage, micro) for micro in range(begin, begin + times)]


def _up_to(m: int, order: Iterable[Action]) -> tuple[Action, ...]:
    """The order without micro-batches from m on: micro-batches do not depend on each other, so it still runs."""
    return tuple([action for action in order if action.micro < m])
