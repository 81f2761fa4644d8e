"""Factors of a cluster's figures that make the planner's step times those of measured runs.

How strongly the logarithm of each run's time depends on the logarithm of each figure decides which figures the runs can
tell apart: those whose columns of this matrix differ. They are fitted by least squares, the others stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log

import numpy

from megalite.base.errors import InputError
from megalite.cost.cluster import Cluster
from megalite.cost.kernels import PEAK_SHARE
from megalite.cost.order_costs import costing_of
from megalite.cost.predict import Trial
from megalite.cost.slowest_gpu import waiting
from megalite.cost.stages import Timer
from megalite.plan.resolved import Plan, resolve
from megalite_tools.plan.measured_runs import MeasuredRun

FIGURES = ("gpu.measured", "gpu.bandwidth", "node.bandwidth", "network.bandwidth")
STEP = 0.1  # change of a logarithm, up and down, over which a dependence is measured
MIN_DEPENDENCE = 0.1  # on a figure, beside those fitted already; times that err by 1 % give it within 10 %
MAX_FACTOR = 4.0  # a factor beyond which, or beyond 1 over which, the runs are not this cluster's
ROUNDS = 30
MAX_CHANGE = 0.5  # change of a logarithm in one round
TOLERANCE = 1e-6  # difference of a logarithm that counts as none


@dataclass(frozen=True)
class Fit:
    """Result of a fit. factors: of the fitted figures. kept: why the others were not. cluster: with the factors."""

    factors: Mapping[str, float]
    kept: Mapping[str, str]
    cluster: Cluster


class Runs:
    """Measured runs, and what a cluster with other figures would make of them."""

    def __init__(self, runs: Sequence[MeasuredRun], cluster: Cluster) -> None:
        self.runs, self._cluster = runs, cluster
        by_gpu = Timer(cluster).costs  # runs that name no cluster have found theirs by the GPU's name
        self._plans: list[Plan] = [resolve(run.config, costing=costing_of(run.config) or by_gpu) for run in runs]
        self._precisions: set[str] = {run.config.train.precision for run in runs}

    def cluster(self, factors: Mapping[str, float]) -> Cluster:
        return scaled(self._cluster, factors, self._precisions)

    def predicted(self, cluster: Cluster) -> list[float]:
        """Seconds of a step of every run."""
        timer = Timer(cluster)
        waits = [waiting(cluster.gpu.spread, plan.config.parallel.layout.world_size) for plan in self._plans]
        return [wait * Trial(plan, timer).seconds for wait, plan in zip(waits, self._plans, strict=True)]

    @cached_property
    def measured(self) -> numpy.ndarray:
        return numpy.log([run.seconds for run in self.runs])

    def logs(self, names: Sequence[str], values: Sequence[float] | numpy.ndarray) -> numpy.ndarray:
        """Logarithms of the predicted times, with these logarithms of factors."""
        factors = {name: exp(value) for name, value in zip(names, values, strict=True)}
        return numpy.log(self.predicted(self.cluster(factors)))

    def slopes(self, names: Sequence[str], values: Sequence[float] | numpy.ndarray) -> numpy.ndarray:
        """Derivatives of log times with respect to the log factors `names`, at `values`: `[runs, figures]`."""
        columns = []
        for at in range(len(names)):
            up, down = list(values), list(values)
            up[at] += STEP
            down[at] -= STEP
            columns.append((self.logs(names, up) - self.logs(names, down)) / (2 * STEP))
        return numpy.stack(columns, axis=1)


def scaled(cluster: Cluster, factors: Mapping[str, float], precisions: set[str]) -> Cluster:
    """The cluster with its figures times `factors`. precisions: those that `gpu.measured` then has, beside its own."""
    gpu, products = cluster.gpu, factors.get("gpu.measured")
    measured = dict(gpu.measured)
    if products is not None:
        for precision in precisions:
            measured.setdefault(precision, PEAK_SHARE * gpu.peak.get(precision, gpu.peak["bf16"]))
        measured = {precision: rate * products for precision, rate in measured.items()}
    memory, node, network = (factors.get(name, 1.0) for name in FIGURES[1:])
    levels = tuple(replace(level, link=level.link.faster(node)) for level in cluster.levels)
    return replace(
        cluster,
        gpu=replace(gpu, measured=measured, bandwidth=gpu.bandwidth * memory),
        levels=levels,
        network=cluster.network.faster(network),
    )


def fit(runs: Runs) -> Fit:
    """The factors of those figures that the runs distinguish. Raises InputError for runs that no such cluster makes.

    Which figure a collective depends on depends on the figures, so those to fit are chosen again after each fit.
    """
    values = dict.fromkeys(FIGURES, 0.0)  # logarithms of factors
    fitted: list[str] = []
    kept: dict[str, str] = {}
    for _ in FIGURES:
        names, kept = _distinct(runs, values)
        if names == fitted:
            break
        fitted, values = names, {**dict.fromkeys(FIGURES, 0.0), **_least_squares(runs, names, values)}
    if not fitted:
        raise InputError("the runs' times depend on none of these figures; give runs of larger models")
    factors = {name: exp(values[name]) for name in FIGURES if name in fitted}
    for name, factor in factors.items():
        if abs(values[name]) > log(MAX_FACTOR) - TOLERANCE:
            rule = f"{name} would have to be {'more' if factor > 1 else 'less'} than {factor:.3g} times as large"
            raise InputError(f"{rule}; the runs are not this cluster's, or something else slows them down")
    return Fit(factors, kept, runs.cluster(factors))


def _least_squares(runs: Runs, names: Sequence[str], begin: Mapping[str, float]) -> dict[str, float]:
    """Gauss and Newton's way to the logarithms with which the logarithms of times err least."""
    values = numpy.array([begin[name] for name in names])
    for _ in range(ROUNDS if names else 0):
        missing = runs.measured - runs.logs(names, values)
        change = numpy.linalg.lstsq(runs.slopes(names, values), missing, rcond=None)[0]
        before = values
        values = numpy.clip(values + numpy.clip(change, -MAX_CHANGE, MAX_CHANGE), -log(MAX_FACTOR), log(MAX_FACTOR))
        if numpy.abs(values - before).max() < TOLERANCE:
            break
    return dict(zip(names, values.tolist(), strict=True))


def _distinct(runs: Runs, values: Mapping[str, float]) -> tuple[list[str], dict[str, str]]:
    """The figures that can be fitted, in the order of FIGURES; and why the others cannot."""
    slopes = runs.slopes(FIGURES, [values[name] for name in FIGURES])
    left = dict(zip(FIGURES, slopes.T, strict=True))
    chosen: list[str] = []
    kept: dict[str, str] = {}
    for name in [name for name, column in left.items() if numpy.linalg.norm(column) < MIN_DEPENDENCE]:
        kept[name] = "no run depends on it enough"
        del left[name]
    while left:
        name = max(left, key=lambda name: float(numpy.linalg.norm(left[name])))
        column = left.pop(name)
        size = numpy.linalg.norm(column)
        if size < MIN_DEPENDENCE:
            kept[name] = f"the runs do not tell it from {' and '.join(chosen)}"
            continue
        chosen.append(name)
        along = column / size
        left = {other: vector - (vector @ along) * along for other, vector in left.items()}
    return sorted(chosen, key=FIGURES.index), kept
