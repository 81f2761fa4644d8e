"""Chinchilla's approach 1: the envelope of loss by FLOPs (arXiv 2203.15556, section 3.1).

Each size has a curve of ln(loss) over ln(tokens) through the final losses of its runs, so the schedule of every point
is one that ends there. Losses inside of a run are not used: a rate that has not decayed yet raises them.
"""

from dataclasses import dataclass

import numpy as np

from megalite.base.errors import InputError, counted
from megalite.scaling.allocation import Allocation, allocation
from megalite.scaling.forms import Array
from megalite.scaling.law import FLOPS

BUDGET_COUNT = 200  # budgets at which curves are compared
MIN_SIZES = 3


@dataclass(frozen=True)
class Fit1:
    """Fit of approach 1. flops, size, loss: points of the envelope at which a size between the outermost is best."""

    law: Allocation
    flops: Array
    size: Array
    loss: Array


def fit1(sizes: Array, tokens: Array, losses: Array) -> Fit1:
    """Fit a law to the envelope. Raises InputError unless two sizes between the outermost are best at some budget."""
    found = envelope(sizes, tokens, losses)
    if found is None:
        raise InputError(
            f"approach 1 needs {MIN_SIZES} sizes with runs on several numbers of tokens each, whose budgets overlap"
        )
    flops, best, loss = found
    kinds = len(np.unique(best))
    if kinds < 2:
        told = counted(kinds, "size") + " between the outermost ones"
        raise InputError(
            f"approach 1 needs two sizes that are best at some budgets, and {told} is; add sizes or budgets"
        )
    return Fit1(allocation(flops, best, loss), flops, best, loss)


def drawn1(sizes: Array, tokens: Array, losses: Array, weights: Array) -> Allocation:
    """The laws of g draws from n runs; nan where a draw has no envelope. weights: `[g, n]`, 0 for runs not drawn."""
    laws = []
    for row in weights:
        some = row > 0
        found = envelope(sizes[some], tokens[some], losses[some])
        enough = found is not None and len(np.unique(found[1])) > 1
        laws.append(allocation(*found) if enough and found else Allocation(np.nan, np.nan, np.nan, np.nan))
    fields = ("constant", "exponent", "floor", "slope")
    return Allocation(*(np.array([getattr(law, name) for law in laws]) for name in fields))


def envelope(sizes: Array, tokens: Array, losses: Array) -> tuple[Array, Array, Array] | None:
    """Budgets, the size that is best at each, and its loss, without budgets whose best size is an outermost one."""
    keys = np.round(np.log(sizes), 6)
    curves = []
    for key in np.unique(keys):
        of = keys == key
        places, where = np.unique(np.round(np.log(tokens[of]), 6), return_inverse=True)
        if len(places) > 1:
            mean = np.bincount(where, np.log(losses[of])) / np.bincount(where)
            curves.append((float(sizes[of][0]), places, mean))
    if len(curves) < MIN_SIZES:
        return None
    spans = [(np.log(FLOPS * size) + places[0], np.log(FLOPS * size) + places[-1]) for size, places, _ in curves]
    budgets = np.linspace(min(low for low, _ in spans), max(high for _, high in spans), BUDGET_COUNT)
    table = np.full((len(curves), BUDGET_COUNT), np.inf)
    for row, (size, places, mean) in enumerate(curves):
        at = budgets - np.log(FLOPS * size)
        within = (at >= places[0]) & (at <= places[-1])
        table[row, within] = np.interp(at[within], places, mean)
    best = np.argmin(table, axis=0)
    known = np.isfinite(table)
    columns = np.arange(BUDGET_COUNT)
    below = np.array([known[: best[at], at].any() for at in columns])
    above = np.array([known[best[at] + 1 :, at].any() for at in columns])
    inner = below & above  # a size below and one above were tried at that budget, and are worse
    if not inner.any():
        return None
    named = np.array([size for size, _, _ in curves])
    return np.exp(budgets[inner]), named[best[inner]], np.exp(table[best[inner], columns[inner]])
