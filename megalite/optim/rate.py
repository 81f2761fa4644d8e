"""Learning-rate schedules as pure functions of the step."""

import math

from megalite.config.schema import LearningRate


def learning_rate(schedule: LearningRate, peak: float, steps: int, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0, in a run of `steps`.

    The rate rises linearly over the warm-up and reaches `peak` at step `warmup`. It then follows the schedule, so
    that the last step has the rate `floor · peak` (constant and inverse_sqrt have no floor).
    """
    if step < schedule.warmup:
        return peak * (step + 1) / (schedule.warmup + 1)
    last = steps - 1
    match schedule.name:
        case "constant":
            return peak
        case "inverse_sqrt":  # Vaswani et al. 2017, arXiv 1706.03762, §5.3
            origin = max(schedule.warmup, 1)
            return peak * math.sqrt(origin / max(step, origin))
        case "linear":
            return _between(peak, schedule.floor, _progress(step, schedule.warmup, last))
        case "cosine":  # Loshchilov and Hutter 2016, arXiv 1608.03983
            progress = _progress(step, schedule.warmup, last)
            return _between(peak, schedule.floor, (1 - math.cos(math.pi * progress)) / 2)
        case "wsd":  # warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395
            decay = max(1, steps // 10) if schedule.decay is None else schedule.decay
            return _between(peak, schedule.floor, _progress(step, max(schedule.warmup, last - decay), last))


def _progress(step: int, start: int, end: int) -> float:
    """The share of the steps from `start` to `end` that lie before `step`, in [0, 1]."""
    return 1.0 if end <= start else min(max((step - start) / (end - start), 0.0), 1.0)


def _between(peak: float, floor: float, progress: float) -> float:
    return peak * (floor + (1 - floor) * (1 - progress))
