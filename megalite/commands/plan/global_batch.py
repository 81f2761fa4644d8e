"""A global batch for a run of known length, where nobody has chosen one."""

from math import log2

from megalite.base.errors import counted
from megalite_launch.base.texts import scaled

FACTOR, POWER = 0.58, 0.571  # Step Law: the best batch is FACTOR · D^POWER tokens (Li et al. 2025, arXiv 2503.04715)


def usual_batch(tokens: float, sequence: int) -> int:
    """Sequences of a global batch for a run of `tokens` tokens: the power of two next to Step Law's optimum."""
    return 1 << max(0, round(log2(FACTOR * tokens**POWER / sequence)))


def batch_text(batch: int, tokens: float, sequence: int) -> str:
    """Why a batch was chosen, and how to choose another."""
    held = f"{counted(batch, 'sequence')}, {scaled(batch * sequence, '')} tokens"
    return (
        f"batch.global is not given, so it is {held}: the power of two next to the best batch for a run of "
        f"{scaled(tokens, '')} tokens by Step Law, {FACTOR} · D^{POWER} tokens (arXiv 2503.04715). "
        "batch.global=N chooses another."
    )
