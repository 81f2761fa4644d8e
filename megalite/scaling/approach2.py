"""Chinchilla's approach 2: an isoFLOP parabola for every budget (arXiv 2203.15556, section 3.2).

The loss is a parabola of ln N; its vertex is the best size. Where alpha and beta differ, or sizes lie to one side of
the vertex, the vertex is off, as losses are no parabolas (arXiv 2603.22339).
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megalite.base.errors import InputError, counted
from megalite.scaling.allocation import MIN_BUDGETS, Allocation, allocation
from megalite.scaling.forms import Array
from megalite.scaling.parabola import MIN_PLACES as SIZES
from megalite.scaling.parabola import Parabola, parabola

BUDGET_TOLERANCE = 0.1  # by which budgets may differ, relatively, to be one


@dataclass(frozen=True)
class Budget:
    """Runs with one budget. places: of its runs in the arrays. why: no size between the outermost ones is best."""

    flops: float
    places: Array
    curve: Parabola | None
    why: str = ""


@dataclass(frozen=True)
class Fit2:
    law: Allocation
    budgets: tuple[Budget, ...]
    drawn: Allocation | None

    @property
    def used(self) -> list[Budget]:
        return [budget for budget in self.budgets if budget.curve is not None]


def budgets_of(flops: Array) -> list[Array]:
    """The places of runs whose budgets are alike, the smallest budget first."""
    order, found = np.argsort(flops, kind="stable"), list[list[int]]()
    for at in order:
        if found and flops[at] <= flops[found[-1][0]] * (1 + BUDGET_TOLERANCE):
            found[-1].append(int(at))
        else:
            found.append([int(at)])
    return [np.array(places) for places in found]


def fit2(sizes: Array, flops: Array, losses: Array, weights: Array | None = None) -> Fit2:
    """Fit n runs. weights: `[g, n]`, of draws. Raises InputError where fewer than two budgets have a best size."""
    budgets = [_budget(sizes, flops, losses, places) for places in budgets_of(flops)]
    used = [budget for budget in budgets if budget.curve is not None]
    if len(used) < MIN_BUDGETS:
        why = Counter(budget.why for budget in budgets if budget.why)
        told = "; ".join(f"{text} ({counted(count, 'budget')})" for text, count in why.most_common(3))
        raise InputError(
            f"{len(used)} of {counted(len(budgets), 'budget')} has a best size between the outermost ones, and "
            f"approach 2 needs {MIN_BUDGETS}: {told}"
        )
    of = np.array([budget.flops for budget in used])
    curves = [budget.curve for budget in used if budget.curve is not None]
    best = np.exp([curve.vertex[0] for curve in curves])
    law = allocation(of, best, np.array([curve.lowest[0] for curve in curves]))
    drawn = None
    if weights is not None:
        again = [parabola(np.log(sizes[each.places]), losses[each.places], weights[:, each.places]) for each in used]
        inside = np.stack([curve.inside for curve in again], axis=1)
        where = [np.stack([getattr(curve, name) for curve in again], axis=1) for name in ("vertex", "lowest")]
        drawn = allocation(of, np.exp(np.where(inside, where[0], 0)), where[1], inside.astype(float))
    return Fit2(law, tuple(budgets), drawn)


def _budget(sizes: Array, flops: Array, losses: Array, places: Array) -> Budget:
    budget = float(np.exp(np.mean(np.log(flops[places]))))
    different = len(np.unique(np.round(np.log(sizes[places]), 6)))
    if different < SIZES:
        return Budget(budget, places, None, f"{counted(different, 'size')}, and {SIZES} are needed")
    curve = parabola(np.log(sizes[places]), losses[places])
    lowest = sizes[places[np.argmin(losses[places])]]
    end = {sizes[places].min(): "smallest", sizes[places].max(): "largest"}.get(lowest)
    if end is not None:
        return Budget(budget, places, None, f"the {end} size has the lowest loss; add {end[:-3]}er ones")
    if not curve.inside[0]:
        return Budget(budget, places, None, "the parabola has no minimum between the outermost sizes")
    return Budget(budget, places, curve)
