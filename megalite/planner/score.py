"""How far predictions are from published runs. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log

from megalite.planner.constants import BOUNDS, FITTED, Constants
from megalite.planner.published import Row, batches_of
from megalite.planner.step import StepModel


@dataclass(frozen=True)
class Timed:
    """A row with a published speed, and the seconds of its step as predicted."""

    row: Row
    predicted: float

    @property
    def measured(self) -> float:
        assert self.row.seconds is not None
        return self.row.seconds

    @property
    def error(self) -> float:
        """Relative; above 0 where the prediction is too slow."""
        return self.predicted / self.measured - 1

    def inside(self, spread: float) -> bool:
        """Whether the measured time lies within the interval around the predicted one."""
        return self.predicted / (1 + spread) <= self.measured <= self.predicted * (1 + spread)


@dataclass(frozen=True)
class Score:
    """Errors of some rows, all relative. p90: nine of ten are at most so far off. bias: mean with its sign."""

    rows: int
    mean_abs_error: float
    p90: float
    bias: float
    inside_interval: float


def timed(rows: Iterable[Row], constants: Constants = FITTED) -> list[Timed]:
    """Predictions for all rows that ran and have a speed. Where micro-batches are unknown, the fastest is taken."""
    found = []
    for row in rows:
        if row.seconds is not None and row.fits:
            steps = [StepModel(work, row.program, row.cluster, constants).step().total for work in batches_of(row)]
            found.append(Timed(row, min(steps)))
    return found


def score(found: Sequence[Timed], constants: Constants = FITTED) -> Score | None:
    """None for no rows."""
    if not found:
        return None
    errors = sorted(abs(each.error) for each in found)
    inside = sum(each.inside(constants.spread) for each in found)
    return Score(
        len(found),
        sum(errors) / len(errors),
        errors[ceil(0.9 * len(errors)) - 1],
        sum(each.error for each in found) / len(found),
        inside / len(found),
    )


def by_source(found: Iterable[Timed]) -> dict[str, list[Timed]]:
    groups: dict[str, list[Timed]] = {}
    for each in found:
        groups.setdefault(each.row.source, []).append(each)
    return groups


def loss(rows: Sequence[Row], constants: Constants) -> float:
    """What a fit makes small: the mean error of rows, and that of sources, each by half; errors as |ln ratio|."""
    found = timed(rows, constants)
    whole = sum(abs(log(1 + each.error)) for each in found) / len(found)
    groups = by_source(found).values()
    return (
        whole + sum(sum(abs(log(1 + each.error)) for each in group) / len(group) for group in groups) / len(groups)
    ) / 2


def fit(rows: Sequence[Row], start: Constants = FITTED, finest: float = 0.015) -> Constants:
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
