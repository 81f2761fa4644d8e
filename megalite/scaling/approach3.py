"""Chinchilla's approach 3: the five parameters of a law from final losses (arXiv 2203.15556, section 3.3)."""

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from megalite.base.errors import InputError
from megalite.scaling.bootstrap import leverage
from megalite.scaling.forms import Array, sum_of_powers
from megalite.scaling.law import Law
from megalite.scaling.solver import Minima, minimize

EXPONENTS, FLOORS = (
    (0.2, 0.4, 0.7),
    (0.2, 0.6, 0.9),
)  # guesses: of alpha and beta, and of E as a share of the lowest loss
MAX_EXPONENT, MIN_EXPONENT = 3.0, 0.01  # bounds of alpha and beta
MIN_FLOOR = 1e-3  # bound of E, as a share of the lowest loss: below, E cannot be told from 0
MIN_RUNS, MIN_VALUES = 6, 3  # runs, and different N and D: below that, five parameters follow from nothing
MIN_SPREAD_RATIO = 0.02  # share of the spread of ln N and ln D that is left of one of them without the other
MIN_CONDITION = 1e-9  # reciprocal, of the scaled normal matrix: below it, parameters cannot be told apart


@dataclass(frozen=True)
class Fit3:
    """Evidence of n runs. residuals: ln of predicted minus ln of measured loss. leverage: of each run.

    centred: the solver's parameters, of logarithms less `centre`. agreeing: of `starts` guesses, those that reached
    the lowest objective. caveats: sentences.
    """

    law: Law
    centred: Array
    centre: tuple[float, float]
    objective: float
    residuals: Array
    leverage: Array
    agreeing: int
    starts: int
    caveats: tuple[str, ...] = field(default=())

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(self.residuals**2)))


def check_points(parameters: Array, tokens: Array, losses: Array) -> None:
    """Raises InputError unless the runs can tell five parameters."""
    runs = f"{len(losses)} run" + "s" * (len(losses) != 1)
    for name, values in (("parameters", parameters), ("tokens", tokens), ("losses", losses)):
        if not (np.isfinite(values) & (values > 0)).all():
            bad = values[~(np.isfinite(values) & (values > 0))][0]
            raise InputError(f"{name}: one is {bad:g}; all must be finite numbers above 0; leave that run out")
    if len(losses) < MIN_RUNS:
        raise InputError(
            f"{runs}: approach 3 has five parameters and needs at least {MIN_RUNS} runs; add sizes or budgets"
        )
    for name, values in (("sizes N", parameters), ("numbers of tokens D", tokens)):
        if (found := len(np.unique(np.round(np.log(values), 6)))) < MIN_VALUES:
            raise InputError(
                f"{runs} have {found} different {name}: approach 3 needs at least {MIN_VALUES}; add runs of others"
            )
    centred = np.stack([np.log(parameters), np.log(tokens)], axis=1)
    centred = centred - centred.mean(axis=0)
    spread = np.linalg.svd(centred / np.sqrt(np.mean(centred**2, axis=0)), compute_uv=False)
    if spread[-1] < MIN_SPREAD_RATIO * spread[0]:
        together = (
            "N and D rise together" if np.sum(centred.prod(axis=1)) > 0 else "D falls as N rises, as in one budget"
        )
        raise InputError(
            f"{runs}: {together}, so what each does to the loss cannot be told; train some size on several numbers of "
            "tokens"
        )
    if np.ptp(losses) == 0:
        raise InputError(f"{runs}: all losses are {losses[0]:g}; there is nothing to fit")


def starts(parameters: Array, tokens: Array, losses: Array) -> Array:
    """27 guesses `[27, 5]` from the data, for centred logarithms: half of what is above E is due to N, half to D."""
    lowest, guesses = losses.min(), []
    for alpha, beta, share in product(EXPONENTS, EXPONENTS, FLOORS):
        floor = share * lowest
        half = np.log(np.median(losses - floor) / 2)
        guesses.append([half, half, np.log(floor), alpha, beta])
    return np.array(guesses)


def bounds(losses: Array) -> tuple[Array, Array]:
    """Lower and upper bounds of the solver's parameters. A and B are effectively unbounded."""
    floor = np.log(losses.min())
    low = [-60.0, -60.0, floor + np.log(MIN_FLOOR), MIN_EXPONENT, MIN_EXPONENT]
    high = [60.0, 60.0, floor + np.log(2.0), MAX_EXPONENT, MAX_EXPONENT]
    return np.array(low), np.array(high)


def fit3(parameters: Array, tokens: Array, losses: Array, delta: float = 1e-3) -> Fit3:
    """The law that runs of N parameters and D tokens tell by their losses.

    The sum of Huber's loss of ln(predicted) - ln(measured) is least. Raises InputError where the runs tell no law, and
    where the solver did not arrive.
    """
    check_points(parameters, tokens, losses)
    inputs, centre = _inputs(parameters, tokens)
    low, high = bounds(losses)
    guesses = starts(parameters, tokens, losses)
    found = minimize(sum_of_powers, inputs, np.log(losses), guesses, delta=delta, low=low, high=high)
    best = found.best
    if not np.isfinite(found.objective[best]):
        raise InputError(f"{len(losses)} runs: no guess leads to a law; look at the losses for values that cannot be")
    told, slopes = sum_of_powers(found.parameters[best : best + 1], inputs)
    caveats = _caveats(found, slopes[0], low, high)
    return Fit3(
        Law.of(found.parameters[best], centre),
        found.parameters[best],
        centre,
        float(found.objective[best]),
        told[0] - np.log(losses),
        leverage(slopes[0]),
        found.agreeing(),
        len(guesses),
        caveats,
    )


def refit(fit: Fit3, parameters: Array, tokens: Array, losses: Array, delta: float, weights: Array) -> Law:
    """The laws for other weights `[g, n]` of the same runs, each from the optimum of `fit`."""
    inputs, _ = _inputs(parameters, tokens)
    low, high = bounds(losses)
    found = minimize(
        sum_of_powers,
        inputs,
        np.log(losses),
        np.repeat(fit.centred[None], len(weights), axis=0),
        delta=delta,
        weights=weights,
        low=low,
        high=high,
        step=1e-5,
    )
    return Law.of(found.parameters, fit.centre)


def _inputs(parameters: Array, tokens: Array) -> tuple[Array, tuple[float, float]]:
    logs = np.stack([np.log(parameters), np.log(tokens)], axis=1)
    centre = logs.mean(axis=0)
    return logs - centre, (float(centre[0]), float(centre[1]))


def _caveats(found: Minima, slopes: Array, low: Array, high: Array) -> tuple[str, ...]:
    at, told = found.parameters[found.best], []
    for number, name in ((3, "alpha"), (4, "beta"), (2, "E")):
        for bound, side in ((low, "lower"), (high, "upper")):
            if at[number] == bound[number]:
                value = np.exp(at[number]) if name == "E" else at[number]
                told.append(f"{name} ended at its {side} bound, {value:.3g}: these runs do not tell it.")
    if not found.arrived[found.best]:
        told.append("The solver was still moving when its rounds ended; the parameters are not final.")
    scaled = slopes / np.maximum(np.sqrt(np.sum(slopes**2, axis=0)), 1e-300)
    values = np.linalg.svd(scaled, compute_uv=False)
    if values[-1] < np.sqrt(MIN_CONDITION) * values[0]:
        told.append("The parameters cannot be told apart: other laws fit these runs as well (singular Jacobian).")
    few = found.agreeing()
    if few < len(found.objective):
        told.append(f"{few} of {len(found.objective)} starts reached the lowest objective; the others ended elsewhere.")
    return tuple(told)
