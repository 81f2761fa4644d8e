"""The law of approach 3: the loss of a model of N parameters after D tokens, and the best N and D for a budget."""

from dataclasses import dataclass

import numpy as np

from megalite.scaling.forms import Array

Number = float | Array
NAMES = ("E", "A", "B", "alpha", "beta")
FLOPS = 6.0  # FLOPs per parameter and token


@dataclass(frozen=True)
class Law:
    """loss = E + A / N^alpha + B / D^beta, in nats per token (Hoffmann et al. 2022, arXiv 2203.15556).

    Every field is a number, or an array of as many laws.
    """

    E: Number
    A: Number
    B: Number
    alpha: Number
    beta: Number

    @staticmethod
    def of(parameters: Array, centre: tuple[float, float] = (0.0, 0.0)) -> "Law":
        """Make the law from parameters `[..., 5]` of `forms.sum_of_powers`, fitted to ln N and ln D less `centre`."""
        a, b, e, alpha, beta = np.moveaxis(np.asarray(parameters, float), -1, 0)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return Law(np.exp(e), np.exp(a + alpha * centre[0]), np.exp(b + beta * centre[1]), alpha, beta)

    @property
    def exponent(self) -> Number:
        """a in N_opt ∝ C^a."""
        return self.beta / (self.alpha + self.beta)

    def loss(self, parameters: Number, tokens: Number) -> Number:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def optimum(self, flops: Number) -> tuple[Number, Number]:
        """N and D with 6·N·D = `flops` for which the loss is lowest."""
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            ratio = np.log(self.alpha * self.A) - np.log(self.beta * self.B)
            size = np.exp(ratio / (self.alpha + self.beta)) * (flops / FLOPS) ** self.exponent
            return size, flops / FLOPS / size

    def best_loss(self, flops: Number) -> Number:
        return self.loss(*self.optimum(flops))
