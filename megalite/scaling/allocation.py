"""Division of a budget between N and D by approaches 1 and 2: a power law through the best size of each budget."""

from dataclasses import dataclass

import numpy as np

from megalite.scaling.forms import Array
from megalite.scaling.law import FLOPS, Number
from megalite.scaling.parabola import line

MIN_BUDGETS = 2  # budgets with a best size


@dataclass(frozen=True)
class Allocation:
    """N_opt = exp(constant) · C^exponent, with C = 6·N·D. Fields are numbers, or arrays of as many laws.

    floor, slope: ln(loss) at the best size is floor + slope · ln C; it knows no irreducible loss.
    """

    constant: Number
    exponent: Number
    floor: Number
    slope: Number

    def optimum(self, flops: Number) -> tuple[Number, Number]:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            size = np.exp(self.constant + self.exponent * np.log(flops))
            return size, flops / FLOPS / size

    def best_loss(self, flops: Number) -> Number:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            told: Number = np.exp(self.floor + self.slope * np.log(flops))
        return told


def allocation(flops: Array, sizes: Array, losses: Array, weights: Array | None = None) -> Allocation:
    """Fit the best sizes and their losses by budget. sizes, losses, weights: `[budgets]` or `[g, budgets]`."""
    log = np.log(flops)
    with np.errstate(invalid="ignore", divide="ignore"):
        constant, exponent = line(log, np.log(sizes), weights)
        floor, slope = line(log, np.log(losses), weights)
    if constant.size == 1:
        return Allocation(*(float(each[0]) for each in (constant, exponent, floor, slope)))
    return Allocation(constant, exponent, floor, slope)
