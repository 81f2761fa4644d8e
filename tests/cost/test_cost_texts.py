"""Predictions in words."""

from types import SimpleNamespace
from typing import cast

import pytest

from megalite.cost.predict import Prediction
from megalite.cost.texts import money, step_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (180_000, "2.1 days (1.8 days – 2.4 days)"),
        (7300, "2.0 hours (1.8 hours – 2.3 hours)"),
        (1100, "18.3 minutes (16.2 minutes – 20.7 minutes)"),
        (950, "950 s (841 s – 1,074 s)"),
        (7.3, "7.30 s (6.46 s – 8.25 s)"),
        (0.95, "950 ms (841 ms – 1.07 s)"),
        (0.00095, "950 µs (841 µs – 1.07 ms)"),
    ],
)
def test_an_interval_has_the_unit_of_its_middle(seconds: float, text: str) -> None:
    found = SimpleNamespace(seconds=seconds, low=seconds / 1.13, high=seconds * 1.13)
    assert step_text(cast(Prediction, found)) == text


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (0, "$0"),
        (0.004, "under $0.01"),
        (0.014, "$0.01"),
        (12.3, "$12.30"),
        (1234.5, "$1,234"),
        (12.3e6, "$12.30 M"),
        (999.99e6, "$999.99 M"),
        (9.8765e12, "$9,876.50 B"),
    ],
)
def test_money_has_cents_where_they_matter(dollars: float, text: str) -> None:
    assert money(dollars) == text
