"""Approaches 1 and 2, Kaplan's law, tasks, and parabolas, against truths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_experiments import TRUTH
from test_scaling_solver import grid

from megalite.base.errors import InputError
from megalite.scaling.approach1 import fit1
from megalite.scaling.approach2 import fit2
from megalite.scaling.bootstrap import draws
from megalite.scaling.downstream import tasks
from megalite.scaling.kaplan import Kaplan, fit_kaplan
from megalite.scaling.law import Law
from megalite.scaling.parabola import line, parabola
from megalite.scaling.table import RunResult


def isoflop(law: Law, sizes: int = 7, width: float = 1.2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N, C and losses, each budget with sizes on both sides of its best."""
    flops = np.repeat(np.logspace(18, 21, 4), sizes)
    n = law.optimum(flops)[0] * np.exp(np.tile(np.linspace(-width, width, sizes), 4))
    return n, flops, law.loss(n, flops / 6 / n)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 0.7), st.floats(0.3, 2.0), st.floats(0.3, 1.5))
def test_approach_2_is_exact_where_both_exponents_are_equal(exponent, floor, width):
    law = Law(floor, 482.0, 2085.0, exponent, exponent)
    n, flops, losses = isoflop(law, width=width)
    fit = fit2(n, flops, losses)
    assert fit.law.exponent == pytest.approx(0.5, abs=1e-9)
    np.testing.assert_allclose(fit.law.optimum(1e20)[0], law.optimum(1e20)[0], rtol=1e-8)


def test_approach_2_is_near_where_they_differ_a_little():
    n, flops, losses = isoflop(TRUTH)
    fit = fit2(n, flops, losses, weights=draws(len(n), 50, 6))
    assert fit.law.exponent == pytest.approx(TRUTH.exponent, abs=0.01)
    assert np.isfinite(fit.drawn.exponent).all()


def test_approach_2_names_budgets_without_a_best_size():
    n, flops, losses = isoflop(TRUTH)
    small = n < TRUTH.optimum(flops)[0]
    with pytest.raises(InputError, match=r"0 of 4 budgets has.*the largest size has the lowest loss; add larger ones"):
        fit2(n[small], flops[small], losses[small])
    with pytest.raises(InputError, match="2 sizes, and 3 are needed"):
        fit2(*(each.reshape(4, 7)[:, :2].ravel() for each in (n, flops, losses)))


def test_approach_1_finds_the_exponent_of_a_dense_ladder():
    n = np.repeat(np.logspace(7, 9, 9), 12)
    d = n * np.tile(np.logspace(-0.3, 2.5, 12), 9)
    fit = fit1(n, d, TRUTH.loss(n, d))
    assert fit.law.exponent == pytest.approx(TRUTH.exponent, abs=0.04)
    inner = set(np.unique(n)[1:-1])
    assert set(fit.size) <= inner


def test_approach_1_refuses_sizes_that_are_never_compared():
    n = np.repeat([1e7, 1e8, 1e9], 3)
    with pytest.raises(InputError, match="approach 1 needs"):
        fit1(n, n * np.tile([1.0, 1.1, 1.2], 3), np.linspace(3, 2, 9))


def test_kaplans_law_is_found_again():
    truth = Kaplan(np.log(8.8e13), np.log(5.4e13), 0.076, 0.095)
    n, d = grid()
    fit = fit_kaplan(n, d, truth.loss(n, d))
    assert fit.law.alpha_n == pytest.approx(0.076, rel=1e-5)
    assert fit.law.alpha_d == pytest.approx(0.095, rel=1e-5)
    assert fit.law.ln_n == pytest.approx(truth.ln_n, rel=1e-5)
    size, tokens = truth.optimum(1e21)
    others = size * np.exp(np.linspace(-0.5, 0.5, 11))
    assert np.argmin(truth.loss(others, 1e21 / 6 / others)) == 5
    assert 6 * size * tokens == pytest.approx(1e21)


def test_the_best_size_of_a_law_is_the_best():
    size, _ = TRUTH.optimum(1e22)
    others = size * np.exp(np.linspace(-0.5, 0.5, 11))
    assert np.argmin(TRUTH.loss(others, 1e22 / 6 / others)) == 5
    assert TRUTH.optimum(1e24)[0] / size == pytest.approx(100**TRUTH.exponent)


@given(st.floats(-3, 3), st.floats(0.1, 5), st.floats(0.2, 2))
def test_a_parabola_has_its_vertex(vertex, curvature, beyond):
    x = np.linspace(vertex - beyond, vertex + 2 * beyond, 6)
    found = parabola(x, 1.5 + curvature * (x - vertex) ** 2)
    assert found.inside[0]
    np.testing.assert_allclose([found.vertex[0], found.lowest[0]], [vertex, 1.5], atol=1e-6)
    assert not parabola(x, 1.5 - curvature * (x - vertex) ** 2).inside[0]
    assert not parabola(x[x > vertex], 1.5 + curvature * (x[x > vertex] - vertex) ** 2).inside[0]


def test_a_parabola_needs_three_places_with_weight():
    x = np.array([0.0, 1.0, 2.0, 3.0])
    weights = np.array([[1.0, 1, 1, 0], [2, 2, 0, 0], [0, 0, 0, 0]])
    assert parabola(x, (x - 1) ** 2, weights).inside.tolist() == [True, False, False]


def test_a_line_passes_over_what_has_no_weight():
    x = np.array([0.0, 1.0, 2.0])
    constant, slope = line(x, np.array([[1.0, 3.0, np.nan]]), np.array([[1.0, 1.0, 0.0]]))
    assert (constant[0], slope[0]) == (1.0, 2.0)
    assert np.isnan(line(np.array([1.0, 1.0]), np.array([1.0, 2.0]))[1])[0]


def _runs(accuracies: np.ndarray, losses: np.ndarray) -> list[RunResult]:
    return [
        RunResult(f"{at}", "", "", "", "done", {"loss_valid": loss}, {}, {"eval/toy/acc": value})
        for at, (loss, value) in enumerate(zip(losses, accuracies, strict=True))
    ]


def test_accuracy_by_loss_is_found_again():
    losses = np.linspace(1.6, 3.0, 12)
    (task,) = tasks(_runs(0.25 + 0.65 / (1 + np.exp(5 * (losses - 2.2))), losses), "loss_valid")
    np.testing.assert_allclose(task.sigmoid, [0.65, 0.25, 5, 2.2], rtol=1e-4)
    (task,) = tasks(_runs(1 - (0.85 - 3.0 * np.exp(-1.1 * losses)), losses), "loss_valid")
    np.testing.assert_allclose(task.error, [0.85, np.log(3.0), 1.1], rtol=1e-4)
    assert task.rms[1] < 1e-6


def test_tasks_that_tell_no_curve_say_why():
    losses = np.linspace(1.6, 3.0, 6)
    for accuracies, why in (
        (np.full(6, 0.25), "lie within"),
        (losses / 4, "accuracy falls as the loss falls"),
        (np.array([0.3, 0.4, *[np.nan] * 4]), "2 runs measured, and 5 are needed"),
    ):
        (task,) = tasks(_runs(accuracies, losses), "loss_valid")
        assert why in task.why
        assert task.sigmoid is None
    assert tasks(_runs(losses, losses), "loss_valid") == []  # perplexities are no accuracies
