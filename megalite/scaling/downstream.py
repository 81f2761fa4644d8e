"""Accuracy of tasks by loss: a sigmoid (arXiv 2412.04403), and the error as an exponential (arXiv 2403.08540)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from megalite.base.errors import counted
from megalite.experiment.folder import EVAL_PREFIX
from megalite.scaling.forms import Array, error_law, sigmoid
from megalite.scaling.solver import minimize
from megalite.scaling.table import RunResult

MIN_RUNS = 5  # runs with a task's metric: a sigmoid has four parameters
MIN_CHANGE = 0.02  # range of an accuracy over all runs: less tells no curve


@dataclass(frozen=True)
class Task:
    """A metric of n runs by their loss. sigmoid: a, b, k, middle; error: most, ln k, gamma. rms: of accuracy.

    why: there is no curve.
    """

    name: str
    losses: Array
    values: Array
    sigmoid: Array | None = None
    error: Array | None = None
    rms: tuple[float, float] | None = None
    why: str = ""

    def accuracy(self, losses: Array) -> Array:
        """The accuracy that the sigmoid predicts at these losses."""
        assert self.sigmoid is not None
        told: Array = sigmoid(self.sigmoid[None], np.asarray(losses, float)[:, None])[0][0]
        return told

    def error_rate(self, losses: Array) -> Array:
        assert self.error is not None
        told: Array = error_law(self.error[None], np.asarray(losses, float)[:, None])[0][0]
        return told


def tasks(runs: Sequence[RunResult], which: str) -> list[Task]:
    """Fit a task for every metric `eval/…` between 0 and 1 that runs have."""
    names = sorted({name for run in runs for name in run.measured if name.startswith(EVAL_PREFIX)})
    found = []
    for name in names:
        pairs = [(run.number(which), run.measured.get(name, np.nan)) for run in runs]
        some = np.array([(loss, value) for loss, value in pairs if loss > 0 and np.isfinite(value)]).reshape(-1, 2)
        if len(some) and ((some[:, 1] >= 0) & (some[:, 1] <= 1)).all():
            found.append(_task(name.removeprefix(EVAL_PREFIX), some[:, 0], some[:, 1]))
    return found


def _task(name: str, losses: Array, values: Array) -> Task:
    if len(losses) < MIN_RUNS:
        return Task(name, losses, values, why=f"{counted(len(losses), 'run')} measured, and {MIN_RUNS} are needed")
    if np.ptp(values) < MIN_CHANGE or np.ptp(losses) == 0:
        return Task(name, losses, values, why=f"all runs lie within {np.ptp(values):.3f}; a curve needs {MIN_CHANGE}")
    slope = np.polyfit(losses, values, 1)[0]
    if slope > 0:
        return Task(name, losses, values, why="accuracy falls as the loss falls")
    inputs, span = losses[:, None], float(np.ptp(losses))
    starts = [
        [height, values.min(), k / span, place]
        for height, k, place in product(
            (np.ptp(values), 1 - values.min()), (2.0, 6.0, 20.0), np.percentile(losses, [0, 25, 50, 75])
        )
    ]
    low, high = losses.min() - 3 * span, losses.max() + 3 * span
    curve = minimize(
        sigmoid, inputs, values, np.array(starts), low=(1e-3, 0.0, 0.1 / span, low), high=(1.0, 1.0, 300 / span, high)
    )
    errors = 1 - values
    begin = [
        [most, np.log(max(most - errors.min(), 1e-3)) + gamma * losses.min(), gamma]
        for most, gamma in product((errors.max(), 1.0), (0.3 / span, 1 / span, 4 / span))
    ]
    other = minimize(
        error_law, inputs, errors, np.array(begin), low=(0.0, -300, 1e-3 / span), high=(1.0, 300, 300 / span)
    )
    rms = [float(np.sqrt(2 * found.objective[found.best] / len(losses))) for found in (curve, other)]
    return Task(
        name,
        losses,
        values,
        curve.parameters[curve.best],
        other.parameters[other.best],
        (rms[0], rms[1]),
    )
