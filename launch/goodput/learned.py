"""Rate of a run's own failures, and the interval between checkpoints that follows from it.

Where nothing has failed yet, machines of every quality are possible: each of PRIORS is a rate of failures that is
exponential around one in so many hours of a GPU. Half of what is believed is the rate of a good data center; a few
failures leave of the others those that fit. A single one of these priors could not do both: its hours would count as
if they had been trained without a failure, and a job that fails every two hours would need years to outweigh them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, fsum, lgamma, log, sqrt

from .formulas import HOUR, HOURS_BETWEEN_FAILURES, Costs, between_failures, daly

PRIORS = tuple((0.1 if at else 0.5, HOURS_BETWEEN_FAILURES / 10**at) for at in range(6))  # weights and hours of a GPU
ROUNDS = 60  # halvings of an interval
MIN_SAVES = 3  # saves from one failure to the next, at least
UNSAVED_FACTOR = 100  # times a save's own cost, for which a run may train unsaved until it has survived longer


@dataclass(frozen=True)
class Rate:
    """Failures per GPU and hour, as gamma distributions of shape `failures` + 1. parts: their weights and hours."""

    failures: int
    parts: tuple[tuple[float, float], ...]

    @property
    def mean(self) -> float:
        return fsum(weight * (self.failures + 1) / hours for weight, hours in self.parts)

    @property
    def hours(self) -> float:
        """Between failures of one GPU."""
        return 1 / self.mean

    def quantile(self, probability: float) -> float:
        """The rate below which the true one is with this probability."""
        count = self.failures + 1
        low, high = 0.0, (count + 10 * sqrt(count) + 10) / min(hours for _, hours in self.parts)
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            below = fsum(weight * _at_least(count, middle * hours) for weight, hours in self.parts)
            low, high = (middle, high) if below < probability else (low, middle)
        return high


def failure_rate(failures: int, gpu_hours: float) -> Rate:
    """Estimate the rate from `failures` in `gpu_hours` and from what was known before."""
    hours = [prior + gpu_hours for _, prior in PRIORS]
    likely = [log(weight * prior) - (failures + 1) * log(all_) for (weight, prior), all_ in zip(PRIORS, hours)]
    most = max(likely)
    weights = [exp(each - most) for each in likely]
    return Rate(failures, tuple((weight / fsum(weights), each) for weight, each in zip(weights, hours)))


def _at_least(count: int, mean: float) -> float:
    """The probability of `count` events or more, of a Poisson process that has `mean`."""
    return 1 - fsum(exp(at * log(mean) - mean - lgamma(at + 1)) for at in range(count))


def learned_interval(rate: float, seen: Rate, gpu_hours: float, gpus: int, save: float, write: float) -> float:
    """Seconds of training between checkpoints: Daly's, below what the run has shown so far, and not below `write`.

    rate: failures per GPU-hour, the mean of `seen` or a bound of it. save, write: seconds. The ceiling is a third of
    the time between the failures that were seen, though not less than a save takes; before the first of them, 100 times
    that or all the time survived.
    """
    survived = gpu_hours * HOUR / gpus
    ceiling = max(survived / seen.failures / MIN_SAVES, save) if seen.failures else max(survived, UNSAVED_FACTOR * save)
    return max(min(daly(Costs(between_failures(gpus, 1 / rate), save, write)), ceiling), write)
