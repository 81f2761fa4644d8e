"""Fitting the planner's constants to published step times. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import fmean

from megalite.cost.constants import FITTED_CONSTANTS, Constants
from megalite_tools.plan.published.rows import Row
from megalite_tools.plan.published.score import chosen

BOUNDS = {  # ranges that a fit may not leave; units as in Constants: mostly shares of a bandwidth or of a time
    "sustained": (0.8, 1.2),
    "throttle": (0.0, 0.5),
    "memory": (0.5, 0.95),
    "node": (0.3, 1.0),
    "network": (0.3, 0.95),
    "launch": (1e-6, 1e-4),
    "hop": (0.1, 2.0),
    "overlap": (0.0, 0.5),
}


def loss(rows: Sequence[Row], constants: Constants) -> float:
    """Objective of a fit: the mean error of rows, and that of sources, each by half; errors as |ln ratio|.

    All rows are timed by the formula, which agrees with `predict` and takes less time.
    """
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.seconds is not None and row.fits:
            errors.setdefault(row.source, []).append(abs(log(chosen(row, constants)[1] / row.seconds)))
    groups = list(errors.values())
    return (fmean(error for group in groups for error in group) + fmean(map(fmean, groups))) / 2


def fit(rows: Sequence[Row], start: Constants = FITTED_CONSTANTS, finest: float = 0.015) -> Constants:
    """Constants with a small loss: each is made larger or smaller in turn, by less and less, down to `finest`."""
    found, best, step = start, loss(rows, start), 0.16
    while step > finest:
        better = False
        for name, (least, most) in BOUNDS.items():
            for factor in (1 + step, 1 - step):
                value = getattr(found, name) * factor
                if not least <= value <= most:
                    continue
                tried = replace(found, **{name: value})
                if (now := loss(rows, tried)) < best - 1e-5:
                    found, best, better = tried, now, True
                    break
        if not better:
            step /= 2
    return found
