"""The forms of laws that are fitted, each with its derivatives, for many guesses of the parameters at once.

A form takes parameters `[g, p]` of g guesses and inputs `[n, k]` of n runs. It returns predictions `[g, n]` and their
derivatives `[g, n, p]`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Form = Callable[[Array, Array], tuple[Array, Array]]


def sum_of_powers(guesses: Array, inputs: Array) -> tuple[Array, Array]:
    """ln(A / N^alpha + B / D^beta + E); Chinchilla's approach 3 (Hoffmann et al. 2022, arXiv 2203.15556, eq. 10).

    guesses: ln A, ln B, ln E, alpha, beta. inputs: ln N and ln D, centred or not.
    """
    n, d = inputs.T
    a, b, e, alpha, beta = _columns(guesses)
    total, (size, data, floor) = _log_sum([a - alpha * n, b - beta * d, e + 0.0 * n])
    return total, np.stack([size, data, floor, -size * n, -data * d], axis=-1)


def kaplan(guesses: Array, inputs: Array) -> tuple[Array, Array]:
    """ln of [(Nc / N)^rho + Dc / D]^kappa (Kaplan et al. 2020, arXiv 2001.08361, eq. 1.5).

    There kappa is their alpha_D and rho is alpha_N / alpha_D. guesses: rho · ln Nc, ln Dc, rho, kappa. inputs: ln N
    and ln D, centred or not.
    """
    n, d = inputs.T
    a, b, rho, kappa = _columns(guesses)
    total, (size, data) = _log_sum([a - rho * n, b - d])
    return kappa * total, np.stack([kappa * size, kappa * data, -kappa * size * n, total], axis=-1)


def sigmoid(guesses: Array, inputs: Array) -> tuple[Array, Array]:
    """b + a / (1 + exp(k · (loss - middle))): accuracy by loss (Bhagia et al. 2024, arXiv 2412.04403).

    guesses: a, b, k, middle. inputs: the loss.
    """
    (loss,) = inputs.T
    a, b, k, middle = _columns(guesses)
    share = 1 / (1 + np.exp(np.clip(k * (loss - middle), -500, 500)))
    slope = a * share * (1 - share)
    return b + a * share, np.stack([share, np.ones_like(share), -slope * (loss - middle), slope * k], axis=-1)


def error_law(guesses: Array, inputs: Array) -> tuple[Array, Array]:
    """most - k · exp(-gamma · loss): error rate by loss (Gadre et al. 2024, arXiv 2403.08540).

    guesses: most, ln k, gamma. inputs: the loss.
    """
    (loss,) = inputs.T
    most, k, gamma = _columns(guesses)
    falling = np.exp(np.clip(k - gamma * loss, -500, 500))
    return most - falling, np.stack([np.ones_like(falling), -falling, falling * loss], axis=-1)


def _columns(guesses: Array) -> Sequence[Array]:
    """The parameters, each `[g, 1]`."""
    return list(guesses.T[:, :, None])


def _log_sum(terms: Sequence[Array]) -> tuple[Array, Array]:
    """ln of the sum of exp(term), and the share of each term in the sum."""
    stacked = np.stack(terms)
    most = stacked.max(axis=0)
    raised = np.exp(stacked - most)
    whole = raised.sum(axis=0)
    return most + np.log(whole), raised / whole
