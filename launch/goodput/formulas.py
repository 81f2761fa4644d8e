"""Failures and checkpoints: which interval loses least, and which share of the time is left. All times are seconds.

The model: failures come at random, `between` seconds apart on average while ranks run. A checkpoint is made after every
`interval` seconds of training, which then stands still for `save`; it can be resumed from `write` seconds later, and
training goes on meanwhile. After a failure `detect` + `restart` seconds pass, in which nothing fails, and training
goes on from the newest checkpoint that can be resumed from.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

HOUR = 3600.0
# Unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783, §3.3.4).
HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419  # hours of one GPU, on average
ROUNDS = 60  # steps of Newton's method, which needs fewer than ten


@dataclass(frozen=True)
class Costs:
    """Costs of failures and checkpoints for a job, in seconds."""

    between: float  # from one failure of the job to the next, on average; inf: nothing fails
    save: float = 0.0  # seconds that training stands still for a checkpoint
    write: float = 0.0  # from then on until it can be resumed from
    detect: float = 0.0  # from a failure until it is noticed
    restart: float = 0.0  # from then on to the first new step


def between_failures(gpus: int, hours: float = HOURS_BETWEEN_FAILURES) -> float:
    """Seconds between failures of a job on `gpus` GPUs. hours: hours between failures of one GPU."""
    return hours * HOUR / gpus


def young(costs: Costs) -> float:
    """The interval that loses least, to first order (Young 1974, doi 10.1145/361147.361115)."""
    return sqrt(2 * costs.save * costs.between)


def daly(costs: Costs) -> float:
    """The interval that loses least, to higher order (Daly 2006, doi 10.1016/j.future.2004.11.016, equation 37).

    It is never shorter than `write`, since a save waits for the one before.
    """
    ratio = costs.save / (2 * costs.between)
    if ratio >= 1:
        return max(costs.between, costs.write)
    found = young(costs) * (1 + sqrt(ratio) / 3 + ratio / 9) - costs.save if ratio else 0.0
    return max(found, costs.write)


def best(costs: Costs) -> float:
    """The interval at which `share` is largest: where (1 − x) e^(x + save/between) = 1, x being interval/between. It is
    at least `write`, and inf if nothing fails."""
    if costs.between == inf:
        return inf
    saved = costs.save / costs.between
    if saved < 1e-12:  # the result would be lost in roundings; the first order is as exact
        return max(young(costs), costs.write)
    x = min(sqrt(2 * saved), 1.0)
    for _ in range(ROUNDS):  # the root of expm1(-x - saved) + x: it is convex, so Newton's method stays on one side
        step = (expm1(-x - saved) + x) / -expm1(-x - saved)
        x -= step
        if abs(step) < 1e-15 * x:
            break
    return max(x * costs.between, costs.write)


def segment(costs: Costs, interval: float) -> float:
    """The expected time from one checkpoint to the next, with all failures between them. `write` must be 0."""
    failing = interval + costs.save
    if costs.between == inf:
        return failing
    return expm1(failing / costs.between) * (costs.between + costs.detect + costs.restart)


def share(costs: Costs, interval: float) -> float:
    """The share of time in which training makes steps that count, in the long run. Exact for the model.

    From a restart to the next failure, an exponential time U, as many intervals count as checkpoints were complete:
    floor((U − write) / (interval + save)). `write` must not exceed `interval`.
    """
    if costs.between == inf:
        return interval / (interval + costs.save) if interval < inf else 1.0
    if interval + costs.save > 700 * costs.between:
        return 0.0  # beyond the numbers of the exponential function
    lagging = exp(-costs.write / costs.between)
    return interval * lagging / segment(costs, interval)


def approximation(costs: Costs, interval: float) -> float:
    """`share` where failures are rare: 1 − δ/(τ + δ) − (τ/2 + L + D + R)/M. It may be negative where they are not."""
    failing = interval / 2 + costs.write + costs.detect + costs.restart
    return 1 - costs.save / (interval + costs.save) - failing / costs.between
