"""Laws that hang on one run: their intervals would not show its noise, so they have none."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from megalite.scaling.allocation import Allocation
from megalite.scaling.bootstrap import MAX_LEVERAGE, leverage
from megalite.scaling.caveats import _hanging
from megalite.scaling.forms import sum_of_powers
from megalite.scaling.law import Law
from megalite.scaling.methods import Fitted, fit_all
from megalite.scaling.points import Points
from megalite.scaling.record import prediction
from megalite.scaling.settings import Settings

TRUTH = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)


def ladder(last: tuple[float, ...]) -> tuple[Any, Any]:
    """N and D of three sizes; the largest has these tokens per parameter, the others four."""
    shape = [(size, ratio * size) for size in (3e7, 1.7e8) for ratio in (5, 12, 32, 80)]
    return np.array([*shape, *((1e9, ratio * 1e9) for ratio in last)]).T


def leverages(last: tuple[float, ...]) -> Any:
    """Leverages of the runs of a ladder, at the truth."""
    logs = np.log(np.stack(ladder(last), axis=1))
    centre = logs.mean(axis=0)
    parts = np.log(TRUTH.A) - TRUTH.alpha * centre[0], np.log(TRUTH.B) - TRUTH.beta * centre[1], np.log(TRUTH.E)
    at = np.array([[*parts, TRUTH.alpha, TRUTH.beta]])
    return leverage(sum_of_powers(at, logs - centre)[1][0])


def test_a_law_goes_through_the_only_run_of_one_of_three_sizes():
    alone, several = leverages((20,)), leverages((10, 40))
    assert abs(alone.sum() - 5) < 1e-6  # as many as parameters
    assert alone.argmax() == 8
    assert alone[8] > 1 - 1e-6
    assert several.max() < MAX_LEVERAGE


def test_it_has_no_draws_and_says_so():
    n, d = ladder((20,))
    losses = TRUTH.loss(n, d) * np.exp(0.003 * np.random.default_rng(0).standard_normal(len(n)))
    runs: Any = tuple(SimpleNamespace(name=f"run{at}") for at in range(len(n)))
    points = Points(runs, {"with_head": n}, d, losses, "loss_valid")
    settings = Settings(kind="ladder", name="x", parameters="with_head", report=("with_head",), bootstrap=10)
    found = fit_all(points, "with_head", settings)["approach3"]
    assert found.law is not None
    assert found.drawn is None
    chosen: Any = SimpleNamespace(fitted=points)
    (told,) = _hanging({"approach3": found}, chosen)
    assert told.startswith("The law of approach3 has no intervals: it goes through run8 whatever its loss is")


def test_a_loss_of_another_law_has_no_interval_of_its_own():
    ones = np.ones(20)
    main = Fitted("approach2", Allocation(1.0, 0.5, 1.0, -0.1), Allocation(ones, 0.5 * ones, ones, -0.1 * ones))
    found = prediction(main, Fitted("approach3", TRUTH), 1e18, 1e18, 9)
    assert found["parameters"][1] is not None
    assert found["loss"][1:] == [None, None]
    assert main.law is not None
    assert found["loss"][0] == float(TRUTH.loss(*main.law.optimum(1e18)))
