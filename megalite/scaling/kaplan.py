"""Kaplan's law: no irreducible loss, and one exponent over the sum of both terms (arXiv 2001.08361, eq. 1.5)."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from megalite.base.errors import InputError
from megalite.scaling.approach3 import check_points
from megalite.scaling.bootstrap import MAX_LEVERAGE, leverage
from megalite.scaling.forms import Array, kaplan
from megalite.scaling.law import FLOPS, Number
from megalite.scaling.solver import minimize

RHO, KAPPA = (0.3, 0.7, 1.2), (0.05, 0.1, 0.3)  # guesses from which fits start
LOW_BOUNDS, HIGH_BOUNDS = (-300.0, -300.0, 0.01, 1e-3), (300.0, 300.0, 10.0, 3.0)


@dataclass(frozen=True)
class Kaplan:
    """loss = [(Nc / N)^(alpha_N / alpha_D) + Dc / D]^alpha_D. Fields are numbers, or arrays of as many laws.

    ln_n, ln_d: logarithms of Nc and Dc.
    """

    ln_n: Number
    ln_d: Number
    alpha_n: Number
    alpha_d: Number

    @staticmethod
    def of(parameters: Array, centre: Array) -> "Kaplan":
        """Make the law from parameters `[..., 4]` of `forms.kaplan` that were fitted to ln N and ln D less `centre`."""
        a, b, rho, kappa = np.moveaxis(np.asarray(parameters, float), -1, 0)
        return Kaplan(a / rho + centre[0], b + centre[1], rho * kappa, kappa)

    @property
    def ratio(self) -> Number:
        return self.alpha_n / self.alpha_d

    @property
    def exponent(self) -> Number:
        """a in N_opt ∝ C^a, of this law, with every model trained to its D."""
        return 1 / (1 + self.ratio)

    def loss(self, parameters: Number, tokens: Number) -> Number:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            size = np.exp(self.ratio * (self.ln_n - np.log(parameters)))
            told: Number = (size + np.exp(self.ln_d - np.log(tokens))) ** self.alpha_d
        return told

    def optimum(self, flops: Number) -> tuple[Number, Number]:
        """Return N and D with (alpha_N / alpha_D) · (Nc / N)^(alpha_N / alpha_D) = Dc / D, and 6·N·D = `flops`."""
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            log = np.log(self.ratio) + self.ratio * self.ln_n - self.ln_d + np.log(flops / FLOPS)
            size = np.exp(log * self.exponent)
            return size, flops / FLOPS / size

    def best_loss(self, flops: Number) -> Number:
        return self.loss(*self.optimum(flops))


@dataclass(frozen=True)
class FitKaplan:
    """A fit of Kaplan's law. residuals: ln of predicted minus ln of measured loss. leverage: of each run."""

    law: Kaplan
    residuals: Array
    leverage: Array
    drawn: Kaplan | None


def fit_kaplan(
    sizes: Array, tokens: Array, losses: Array, delta: float = 1e-3, weights: Array | None = None
) -> FitKaplan:
    """Fit Kaplan's law to n runs. weights: `[g, n]`, of draws. Raises InputError where the runs determine no law."""
    check_points(sizes, tokens, losses)
    inputs = np.stack([np.log(sizes), np.log(tokens)], axis=1)
    centre = inputs.mean(axis=0)
    target = np.log(losses)
    level = float(np.median(target))
    guesses = [[level / k - np.log(2), level / k - np.log(2), rho, k] for rho, k in product(RHO, KAPPA)]
    found = minimize(kaplan, inputs - centre, target, np.array(guesses), delta=delta, low=LOW_BOUNDS, high=HIGH_BOUNDS)
    if not np.isfinite(found.objective[found.best]):
        raise InputError(f"{len(losses)} runs: Kaplan's law fits none of the guesses")
    best = found.parameters[found.best]
    held = leverage(kaplan(best[None], inputs - centre)[1][0])
    drawn = None
    if weights is not None and held.max() < MAX_LEVERAGE:
        again = minimize(
            kaplan,
            inputs - centre,
            target,
            np.repeat(best[None], len(weights), axis=0),
            delta=delta,
            weights=weights,
            low=LOW_BOUNDS,
            high=HIGH_BOUNDS,
            step=1e-5,
        )
        drawn = Kaplan.of(again.parameters, centre)
    law = Kaplan.of(best, centre)
    number = Kaplan(*(float(np.asarray(value)) for value in (law.ln_n, law.ln_d, law.alpha_n, law.alpha_d)))
    return FitKaplan(number, np.log(number.loss(sizes, tokens)) - target, held, drawn)
