"""Fitting constants to published runs."""

from dataclasses import replace

from megalite.cost.constants import FITTED_CONSTANTS
from megalite_tools.plan.published.fit import BOUNDS, fit, loss
from megalite_tools.plan.published.rows import Row


def test_fitted_constants_are_within_their_bounds() -> None:
    assert all(least <= getattr(FITTED_CONSTANTS, name) <= most for name, (least, most) in BOUNDS.items())


def test_a_fit_finds_its_way_back(rows: list[Row]) -> None:
    few = [row for row in rows if row.source.startswith(("Korthikanti", "SimuMax"))]
    start = replace(FITTED_CONSTANTS, memory=0.5, network=0.3)
    found = fit(few, start, finest=0.1)
    assert loss(few, found) < 0.8 * loss(few, start)
