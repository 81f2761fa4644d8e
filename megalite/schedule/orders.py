"""Compute orders of the schedules whose backward is not split: what each rank does, without transfers."""

from collections.abc import Sequence
from itertools import pairwise

from megalite.schedule.actions import Action, Kind, Orders


def gpipe(p: int, m: int) -> Orders:
    """All forwards, then all backwards; a rank holds m micro-batches (Huang et al., arXiv 1811.06965).

    Backwards run in the order of forwards, so gradients accumulate in the same order as under 1F1B.
    """
    return tuple(
        tuple(Action(kind, stage, micro) for kind in (Kind.F, Kind.B) for micro in range(m)) for stage in range(p)
    )


def one_f_one_b(p: int, m: int) -> Orders:
    """Each backward as early as possible; rank r holds min(m, p − r) micro-batches (PipeDream-flush, arXiv 2006.09503).

    Rank r runs ahead by p − r − 1 forwards, alternates forward and backward, then drains its backwards.
    """

    def order(stage: int) -> tuple[Action, ...]:
        forward = [Action(Kind.F, stage, micro) for micro in range(m)]
        backward = [Action(Kind.B, stage, micro) for micro in range(m)]
        return alternate(forward, backward, ahead=p - stage - 1)

    return tuple(order(stage) for stage in range(p))


def interleaved(p: int, m: int, v: int) -> Orders:
    """1F1B on v stages per rank, s on rank s mod p: the bubble shrinks v times (Megatron-LM, arXiv 2104.04473 §2.2).

    Micro-batches go in rounds through all stages of a rank: forward from its first stage, backward from its last. A
    round of at least p micro-batches is back at a rank before the rank has finished it, so nothing waits between
    rounds. Where p does not divide m, rounds of unequal size, the larger first, keep this true for every m >= p. With n
    micro-batches in the first round, rank r holds at most (v − 1) · n + 2 · (p − r − 1) + 1 stage-activations.
    """
    if v == 1:
        return one_f_one_b(p, m)
    rounds = rounds_of(p, m)

    def order(rank: int) -> tuple[Action, ...]:
        stages = range(rank, p * v, p)
        forward = [Action(Kind.F, stage, micro) for turn in rounds for stage in stages for micro in turn]
        backward = [Action(Kind.B, stage, micro) for turn in rounds for stage in reversed(stages) for micro in turn]
        return alternate(forward, backward, ahead=(v - 1) * len(rounds[0]) + 2 * (p - rank - 1))

    return tuple(order(rank) for rank in range(p))


def rounds_of(p: int, m: int) -> list[range]:
    """The number of micro-batches in every round of `interleaved`, the largest first."""
    count, size, larger = _rounds(p, m)
    starts = [k * size + min(k, larger) for k in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def first_rounds(p: int, m: int) -> tuple[int, ...]:
    """The number of micro-batches in the first two rounds of `interleaved`, or in the only one."""
    count, size, larger = _rounds(p, m)
    return tuple(size + (at < larger) for at in range(min(count, 2)))


def _rounds(p: int, m: int) -> tuple[int, int, int]:
    """The number of rounds, the size of a smaller round, and how many rounds have one micro-batch more."""
    count = max(1, m // p)
    return count, *divmod(m, count)


def forward_only(placement: Sequence[int], m: int) -> Orders:
    """Evaluation: micro-batches pass through the stages one after the other, without backward."""
    # A stage is a step behind the one before it, so by s + i every rank always has a micro-batch at hand.
    forward = [Action(Kind.F, stage, micro) for stage in range(len(placement)) for micro in range(m)]
    wave = sorted(forward, key=lambda action: action.stage + action.micro)
    return tuple(
        tuple(action for action in wave if placement[action.stage] == rank) for rank in range(max(placement) + 1)
    )


def alternate(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then forward and backward in turn, then the backwards that remain."""
    ahead = min(ahead, len(forward))
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])
