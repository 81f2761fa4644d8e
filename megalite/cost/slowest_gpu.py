"""Waiting of a step for the slowest of its GPUs. Imports no torch."""

from statistics import NormalDist

MAX_SPREAD = 0.2  # with more, the slowest of many GPUs would hardly run at all
PUBLISHED_SPREAD = 0.011  # spread of GPUs' speeds: follows from errors of published rows (docs/planner_evidence.md)


def slowest(gpus: int) -> float:
    """Standard deviations by which the slowest of `gpus` GPUs is expected to be slower than the mean.

    It is the expected largest of as many normal deviates, by Blom's formula, which is within 2 % from four GPUs on.
    """
    return NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))


def waiting(spread: float | None, gpus: int) -> float:
    """Time of a step on GPUs of this spread, relative to that on GPUs of published runs; at least 1.

    spread: relative standard deviation of the GPUs' speeds; None where nobody has measured it. Published steps have
    waited for their slowest GPU, too, so that predictions contain what PUBLISHED_SPREAD makes of it.
    """
    if spread is None:
        return 1.0
    behind = slowest(gpus)
    return max(1.0, (1 + spread * behind) / (1 + PUBLISHED_SPREAD * behind))
