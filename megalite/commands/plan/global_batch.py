"""A global batch for a run of known length, where nobody has chosen one."""

from collections.abc import Iterable
from math import lcm, log2

from megalite.base.errors import counted
from megalite_launch.base.texts import scaled

FACTOR, POWER = 0.58, 0.571  # Step Law: the best batch is FACTOR · D^POWER tokens (Li et al. 2025, arXiv 2503.04715)


def usual_batch(tokens: float, sequence: int, gpus: Iterable[int] = ()) -> int:
    """Sequences of a global batch for a run of `tokens` tokens, next to Step Law's optimum.

    It is a power of two times the odd factors of the numbers of GPUs, so that these can share it evenly; without the
    factors where they are more than that optimum.
    """
    best = FACTOR * tokens**POWER / sequence
    odd = lcm(*(count // _power_of_two(count) for count in gpus))
    odd = odd if odd <= best else 1
    return odd << max(0, round(log2(best / odd)))


def _power_of_two(number: int) -> int:
    """The largest power of two that divides a number."""
    return number & -number


def batch_text(batch: int, tokens: float | None, sequence: int) -> str:
    """Why a batch was taken, and how to choose another. tokens: of the run; None: the default batch was taken."""
    held = f"batch.global is not given, so it is {counted(batch, 'sequence')}, {scaled(batch * sequence, '')} tokens"
    if tokens is None:
        return f"{held}: the default. batch.global=N chooses another."
    odd = batch // _power_of_two(batch)
    power = "the power of two" if odd == 1 else f"{odd} times a power of two, which these GPUs can share evenly,"
    return (
        f"{held}: {power} next to the best batch for a run of {scaled(tokens, '')} tokens by Step Law, "
        f"{FACTOR} · D^{POWER} tokens (arXiv 2503.04715). batch.global=N chooses another."
    )
