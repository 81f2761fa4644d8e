"""Robust least squares for many guesses at once: Levenberg–Marquardt on iteratively reweighted squares.

The objective is the weighted sum of Huber's loss of the residuals. A sum, not a mean: stopping rules do not depend
on how many runs there are. Huber's loss is at most the square with the weight min(1, delta / |residual|) that touches
it (Huber 1981, section 7.8), so every step that lessens those squares lessens it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalite.scaling.forms import Array, Form

ROUNDS = 2000
GUESS_BATCH = 256  # guesses that are improved at once; their derivatives stay in a processor's cache
MIN_STEP, MIN_GAIN = 1e-10, 1e-15  # a guess has arrived when a step changes no parameter, and the objective, by more
FIRST_DAMPING, MIN_DAMPING, MAX_DAMPING = 1e-3, 1e-12, 1e12


@dataclass(frozen=True)
class Minima:
    """The results of g guesses: the parameters at which each ended, and the objective there.

    parameters: `[g, p]`. objective: `[g]`. arrived: `[g]`, whether the last step was too small to matter.
    """

    parameters: Array
    objective: Array
    arrived: np.ndarray

    @property
    def best(self) -> int:
        return int(np.argmin(np.where(np.isfinite(self.objective), self.objective, np.inf)))

    def agreeing(self, within: float = 1e-6) -> int:
        """Count the guesses that reached the lowest objective, up to a relative difference."""
        lowest = self.objective[self.best]
        return int(np.sum(self.objective <= lowest * (1 + within) + 1e-24))


def huber(residuals: Array, delta: float) -> Array:
    """Squares / 2 up to `delta`, straight lines beyond."""
    size = np.abs(residuals)
    if not np.isfinite(delta):
        return 0.5 * size * size
    return np.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta))


def minimize(
    form: Form,
    inputs: Array,
    targets: Array,
    guesses: Array,
    *,
    delta: float = np.inf,
    weights: Array | None = None,
    low: Sequence[float] | Array = (),
    high: Sequence[float] | Array = (),
    step: float = MIN_STEP,
) -> Minima:
    """Improve every guess until it stays.

    inputs: `[n, k]`, targets: `[n]`, guesses: `[g, p]`. weights: `[g, n]`, how often each run counts, 1 where there are
    none. low, high: bounds of the p parameters; those that a guess stands at are left out of its steps. step: a guess
    has arrived when a step changes no parameter by more.
    """
    count, size = guesses.shape
    bounds = (
        np.asarray(low, float) if len(low) else np.full(size, -np.inf),
        np.asarray(high, float) if len(high) else np.full(size, np.inf),
    )
    parts = []
    for first in range(0, count, GUESS_BATCH):
        some = slice(first, first + GUESS_BATCH)
        given = np.ones((len(guesses[some]), len(targets))) if weights is None else weights[some]
        parts.append(_Descent(form, inputs, targets, guesses[some], delta, given, bounds, step).run())
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("parameters", "objective")]
    return Minima(joined[0], joined[1], np.concatenate([part.arrived for part in parts]))


class _Descent:
    """The guesses of one batch that have not arrived yet, and where the others ended."""

    def __init__(
        self,
        form: Form,
        inputs: Array,
        targets: Array,
        guesses: Array,
        delta: float,
        weights: Array,
        bounds: tuple[Array, Array],
        step: float,
    ) -> None:
        self.form, self.inputs, self.targets, self.delta = form, inputs, targets, delta
        self.bounds, self.step = bounds, step
        self.at = np.clip(guesses, *bounds)
        self.weights = weights
        self.damping = np.full(len(guesses), FIRST_DAMPING)
        self.residuals, self.slopes, self.objective = self._look(self.at, weights)
        self.places = np.arange(len(guesses))
        self.found = Minima(self.at.copy(), self.objective.copy(), np.zeros(len(guesses), bool))

    def run(self) -> Minima:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for _ in range(ROUNDS):
                self._settle(self._round())
                if not len(self.places):
                    break
        return self.found

    def _look(self, at: Array, weights: Array) -> tuple[Array, Array, Array]:
        with np.errstate(over="ignore", invalid="ignore"):
            told, slopes = self.form(at, self.inputs)
            residuals = told - self.targets
            objective = np.sum(weights * huber(residuals, self.delta), axis=1)
        return residuals, slopes, np.where(np.isfinite(objective), objective, np.inf)

    def _round(self) -> np.ndarray:
        """One step of every guess, kept where it lessens the objective. Returns which have arrived."""
        steps = self._steps()
        trial = np.clip(self.at + steps, *self.bounds)
        residuals, slopes, objective = self._look(trial, self.weights)
        better = objective < self.objective
        with np.errstate(invalid="ignore"):
            gain = np.where(better, (self.objective - objective) / self.objective, 0.0)
        still = np.max(np.abs(trial - self.at), axis=1) < self.step
        arrived = (
            (self.objective == 0)
            | (still & (gain < max(MIN_GAIN, self.step**2)))
            | (~better & (self.damping >= MAX_DAMPING))
        )
        self.at[better], self.objective[better] = trial[better], objective[better]
        self.residuals[better], self.slopes[better] = residuals[better], slopes[better]
        self.damping = np.clip(np.where(better, self.damping / 10, self.damping * 10), MIN_DAMPING, MAX_DAMPING)
        return arrived

    def _steps(self) -> Array:
        size = np.maximum(np.abs(self.residuals), 1e-300)
        each = self.weights * np.minimum(1.0, self.delta / size)
        turned = np.swapaxes(self.slopes, 1, 2) * each[:, None, :]
        down = -np.matmul(turned, self.residuals[:, :, None])[:, :, 0]
        square = np.matmul(turned, self.slopes)
        held = ((self.at <= self.bounds[0]) & (down < 0)) | ((self.at >= self.bounds[1]) & (down > 0))
        down = np.where(held, 0.0, down)
        square = np.where(held[:, :, None] | held[:, None, :], 0.0, square)
        diagonal = np.einsum("gpp->gp", square)
        diagonal[:] = diagonal * (1 + self.damping[:, None]) + np.where(held, 1.0, 0.0)
        diagonal[:] += 1e-300 + 1e-16 * np.max(diagonal, axis=1, keepdims=True)  # never singular
        steps = np.linalg.solve(square, down[:, :, None])[:, :, 0]
        return np.where(np.isfinite(steps), steps, 0.0)

    def _settle(self, arrived: np.ndarray) -> None:
        """Take note of where guesses are, and go on with those that have not arrived."""
        self.found.parameters[self.places], self.found.objective[self.places] = self.at, self.objective
        self.found.arrived[self.places] = arrived
        if arrived.any():
            left = ~arrived
            for name in ("at", "weights", "damping", "residuals", "slopes", "objective", "places"):
                setattr(self, name, getattr(self, name)[left])
