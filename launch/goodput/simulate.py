"""Runs with random failures, from one failure to the next: what a closed form leaves out is the end, and chance."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from random import Random
from statistics import mean, stdev

from .formulas import Costs

CONFIDENCE_QUANTILE = 1.96  # standard errors of a mean within which the true one lies with a probability of 95 %


@dataclass(frozen=True)
class Simulated:
    """Shares of time that count, over many runs. error: half the 95 % interval of their mean."""

    mean: float
    error: float
    low: float  # a twentieth of the runs come to less
    high: float  # and a twentieth to more
    failures: float  # failures of a run, on average


def simulate(costs: Costs, interval: float, seconds: float, runs: int, seed: int = 0) -> Simulated:
    """Simulate `runs` runs of `seconds` each. Training at the end of a run counts, saved or not."""
    random = Random(seed)
    found = [_run(random, costs, interval, seconds) for _ in range(runs)]
    shares = sorted(share for share, _ in found)
    error = CONFIDENCE_QUANTILE * stdev(shares) / sqrt(runs) if runs > 1 else inf
    last = runs - 1
    failures = mean(failures for _, failures in found)
    return Simulated(mean(shares), error, shares[round(0.05 * last)], shares[round(0.95 * last)], failures)


def _run(random: Random, costs: Costs, interval: float, seconds: float) -> tuple[float, int]:
    """The share of one run's time that counts, and its failures."""
    clock = worked = 0.0
    failures = 0
    period = interval + costs.save
    while clock < seconds:
        runs_for = random.expovariate(1 / costs.between) if costs.between < inf else inf
        if clock + runs_for >= seconds:
            left = seconds - clock
            whole = left // period if period < inf else 0.0
            worked += (whole * interval if whole else 0.0) + min(left - (whole * period if whole else 0.0), interval)
            break
        failures += 1
        worked += max(runs_for - costs.write, 0.0) // period * interval
        clock += runs_for + costs.detect + costs.restart
    return worked / seconds, failures
