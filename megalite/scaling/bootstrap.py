"""Intervals by drawing the runs of an experiment again (Efron 1979): how often each counts, for many draws at once.

Runs are drawn, not residuals: intervals from residuals are too narrow for ladders of 9 to 64 runs (docs/scaling.md).
"""

from dataclasses import dataclass

import numpy as np

from megalite.scaling.forms import Array

COVERAGE = 0.9
MAX_LEVERAGE = 0.97  # leverage of a run above which draws tell nothing of what its noise does to the law
SEED = 20240415  # seed of all draws, so that the same results give the same intervals


@dataclass(frozen=True)
class Interval:
    """A value, and where COVERAGE of the draws lie. draws: those that gave a number."""

    value: float
    low: float
    high: float
    draws: int

    def plain(self) -> list[float | None]:
        """Return value, low and high as they are in `fit.json`: null where there is none."""
        return [each if np.isfinite(each) else None for each in map(float, (self.value, self.low, self.high))]


def draws(runs: int, samples: int, different: int = 1, seed: int = SEED) -> Array:
    """`[samples, runs]`: how often each run was drawn, of as many draws with replacement as there are runs.

    different: the fewest different runs of a draw. Draws with fewer tell no law and are made again.
    """
    generator, share = np.random.default_rng(seed), np.full(runs, 1 / runs)
    found = generator.multinomial(runs, share, samples).astype(float)
    while len(poor := np.flatnonzero((found > 0).sum(axis=1) < min(different, runs))):
        found[poor] = generator.multinomial(runs, share, len(poor))
    return found


def leverage(slopes: Array) -> Array:
    """`[n]`: how much of each run's noise its own prediction follows, from 0 to 1. slopes: `[n, p]`, of predictions.

    A law goes through a run of leverage 1 whatever its loss is, as where one of three sizes has a single run: its
    residual is 0 in every draw that has it, so that draws do not scatter as its noise does.
    """
    scaled = slopes / np.maximum(np.sqrt(np.sum(slopes**2, axis=0)), 1e-300)
    left, values, _ = np.linalg.svd(scaled, full_matrices=False)
    told: Array = np.sum(left[:, values > 1e-9 * values[0]] ** 2, axis=1)
    return told


def interval(value: float, drawn: Array, runs: int, logarithmic: bool = False) -> Interval:
    """The interval of values that draws of `runs` runs gave; nan stands for no value.

    Draws spread less than samples do, by sqrt((n - 1) / n); the interval is stretched about its median by as much
    (Hesterberg 2015, "What teachers should know about the bootstrap"), in logarithms where asked.
    """
    drawn = np.asarray(drawn, float)
    if logarithmic:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            logs = interval(np.log(value), np.log(drawn), runs)
            return Interval(float(value), float(np.exp(logs.low)), float(np.exp(logs.high)), logs.draws)
    finite = drawn[np.isfinite(drawn)]
    if not len(finite):
        return Interval(float(value), np.nan, np.nan, 0)
    low, middle, high = np.percentile(finite, [50 * (1 - COVERAGE), 50, 50 * (1 + COVERAGE)])
    stretch = np.sqrt(runs / max(runs - 1, 1))
    return Interval(float(value), middle + (low - middle) * stretch, middle + (high - middle) * stretch, len(finite))
