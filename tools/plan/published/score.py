"""Compares predictions with published runs. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log, sqrt
from statistics import fmean
from typing import TypeVar

from megalite.cost.constants import FITTED_CONSTANTS, Constants
from megalite.cost.predict import predict
from megalite.cost.slowest_gpu import slowest
from megalite.cost.stages import Timer
from megalite_tools.plan.published.as_configuration import expressed
from megalite_tools.plan.published.memory import SPREADS, UNKNOWN_MEMORY_SPREAD, counted, fits
from megalite_tools.plan.published.profiles import UNKNOWN_SPREAD
from megalite_tools.plan.published.rows import Row, works_of
from megalite_tools.plan.published.step import StepModel
from megalite_tools.plan.published.work import Work

TREND_RANGE = 8  # times as many GPUs of a source's largest run as of its smallest, from which on it shows a trend
TOP_LAYOUTS = 3  # best layouts of a group, as predicted, among which the best measured one should be


@dataclass(frozen=True)
class Compared:
    """A row's figure, predicted and measured. spread: half the width of the interval, relative to the prediction.

    formula: of a time that `predict` gives, since a configuration expresses the row, what the formula for other
    programs says.
    """

    row: Row
    predicted: float
    measured: float
    spread: float
    formula: float | None = None

    @property
    def error(self) -> float:
        """Relative error; above 0 where too much is predicted."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """True where the measured figure lies within the interval around the prediction."""
        return self.predicted / (1 + self.spread) <= self.measured <= self.predicted * (1 + self.spread)


@dataclass(frozen=True)
class Judged:
    """A row, and whether it is predicted to fit into its GPUs."""

    row: Row
    fits: bool

    @property
    def right(self) -> bool:
        return self.fits == self.row.fits


Told = TypeVar("Told", Compared, Judged)


@dataclass(frozen=True)
class Score:
    """Errors of some rows, all relative. p90: nine of ten are at most so far off. bias: mean with its sign."""

    rows: int
    mean_abs_error: float
    p90: float
    bias: float
    inside_interval: float


@dataclass(frozen=True)
class Ranking:
    """Counts of groups whose best measured layout is among the TOP_LAYOUTS predicted ones.

    groups: of at least two layouts of one model on as many GPUs. contested: groups of more than TOP_LAYOUTS, where it
    means something.
    """

    groups: int
    right: int
    contested: int
    contested_right: int


@dataclass(frozen=True)
class Trend:
    """Excess of measured times over predicted ones on more GPUs, within sources.

    spread: relative standard deviation of GPUs' speeds with which waiting for the slowest would make it so. error: its
    standard error, with rows of a source taken to err together. sources: of at least TREND_RANGE times as many GPUs.
    """

    spread: float
    error: float
    sources: int


def chosen(row: Row, constants: Constants = FITTED_CONSTANTS) -> tuple[Work, float]:
    """Choose the row's work, and time its step. Where micro-batches are unknown, the fastest that fit are taken."""
    works = list(works_of(row))
    works = [work for work in works if fits(work, row.program, row.cluster.gpu.memory)] or works
    steps = ((work, StepModel(work, row.program, row.cluster, constants).step().total) for work in works)
    return min(steps, key=lambda step: step[1])


def timed(rows: Iterable[Row], constants: Constants = FITTED_CONSTANTS) -> list[Compared]:
    """Step times of all rows that ran and have a speed: `predict`'s, or where no configuration is such a run, those of
    the formula for other programs."""
    return [_timed(row, row.seconds, constants) for row in rows if row.seconds is not None and row.fits]


def _timed(row: Row, measured: float, constants: Constants) -> Compared:
    work, seconds = chosen(row, constants)
    spread = constants.spread if row.program.known else UNKNOWN_SPREAD
    config = expressed(work, row.program, row.cluster)
    if config is None:
        return Compared(row, seconds, measured, spread)
    planned = predict(config, row.cluster, Timer(row.cluster, constants, row.program)).seconds
    return Compared(row, planned, measured, spread, seconds)


def planned(found: Iterable[Compared]) -> list[Compared]:
    """Select the times that are `predict`'s."""
    return [each for each in found if each.formula is not None]


def by_formula(found: Iterable[Compared]) -> list[Compared]:
    """Select the times that are `predict`'s, and put those of the formula for other programs in their place."""
    return [replace(each, predicted=each.formula) for each in found if each.formula is not None]


def weighed(rows: Iterable[Row]) -> list[Compared]:
    """Predicted beside published memory, for all rows that have it; both count what their sources count."""
    return [
        Compared(
            row,
            counted(chosen(row)[0], row.program, row.counts),
            row.memory,
            SPREADS[row.counts] if row.program.known else UNKNOWN_MEMORY_SPREAD,
        )
        for row in rows
        if row.memory is not None
    ]


def judged(rows: Iterable[Row]) -> list[Judged]:
    """Judge which rows fit in GPU memory. A row of unknown micro-batch size fits if any size does."""
    return [Judged(row, any(fits(work, row.program, row.cluster.gpu.memory) for work in works_of(row))) for row in rows]


def score(found: Sequence[Compared]) -> Score | None:
    """Sum up the errors of some rows; None for no rows."""
    if not found:
        return None
    errors = sorted(abs(each.error) for each in found)
    return Score(
        len(found),
        sum(errors) / len(errors),
        errors[ceil(0.9 * len(errors)) - 1],
        sum(each.error for each in found) / len(found),
        sum(each.inside for each in found) / len(found),
    )


def ranking(found: Iterable[Compared]) -> Ranking:
    """Count the groups whose best layout is found, from step times. A group's rows may have batches of different sizes,
    so tokens per second are compared."""
    groups: dict[object, dict[object, Compared]] = {}
    for each in found:
        layouts = groups.setdefault(each.row.group, {})
        layout = each.row.work, each.row.program
        if layout not in layouts or each.measured < layouts[layout].measured:
            layouts[layout] = each
    several = [list(layouts.values()) for layouts in groups.values() if len(layouts) > 1]
    right = [_near_the_top(layouts) for layouts in several]
    contested = [hit for hit, layouts in zip(right, several, strict=True) if len(layouts) > TOP_LAYOUTS]
    return Ranking(len(right), sum(right), len(contested), sum(contested))


def _near_the_top(layouts: Sequence[Compared]) -> bool:
    best = min(layouts, key=lambda each: each.measured / each.row.batch)
    return best in sorted(layouts, key=lambda each: each.predicted / each.row.batch)[:TOP_LAYOUTS]


def by_source(found: Iterable[Told]) -> dict[str, list[Told]]:
    """Group rows by who published them."""
    groups: dict[str, list[Told]] = {}
    for each in found:
        groups.setdefault(each.row.source, []).append(each)
    return groups


def trend(found: Iterable[Compared]) -> Trend | None:
    """Fit how errors of step times grow with the number of GPUs, each source with the same weight.

    None where fewer than two sources have runs on numbers of GPUs that are far enough apart.
    """
    deviations = []  # by source: of a row, how much slower its slowest GPU is, and how much longer it took, less means
    for group in by_source(found).values():
        gpus = [each.row.work.gpus for each in group]
        if max(gpus) >= TREND_RANGE * min(gpus):
            behind, errors = (
                [slowest(count) for count in gpus],
                [-log(each.predicted / each.measured) for each in group],
            )
            middle, bias, each_counts = fmean(behind), fmean(errors), 1 / sqrt(len(group))
            deviations.append(
                [((b - middle) * each_counts, (e - bias) * each_counts) for b, e in zip(behind, errors, strict=True)]
            )
    if len(deviations) < 2:
        return None
    scale = sum(b * b for group in deviations for b, _ in group)
    slope = sum(b * e for group in deviations for b, e in group) / scale
    spread_out = sum(sum(b * (e - slope * b) for b, e in group) ** 2 for group in deviations)
    return Trend(slope, sqrt(spread_out) / scale, len(deviations))
