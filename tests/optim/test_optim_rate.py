"""Learning-rate schedules: bounds, ends, monotony, and values worked out by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.rules.validate import validate
from megalite.config.schema import Config, LearningRate, Train
from megalite.optim.rate import learning_rate

NAMES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
WITH_FLOOR = ("linear", "cosine", "wsd")


@st.composite
def runs(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> tuple[LearningRate, float, int]:
    """A schedule that validation accepts, a peak and a number of steps."""
    steps = draw(st.integers(1, 300))
    warmup = draw(st.integers(0, steps - 1))
    name = draw(st.sampled_from(names))
    decay = draw(st.none() | st.integers(1, steps - warmup)) if name == "wsd" else None
    schedule = LearningRate(name, warmup, decay, draw(st.floats(0, 1)))
    return schedule, draw(st.floats(1e-6, 1.0)), steps


def rates(schedule: LearningRate, peak: float, steps: int) -> list[float]:
    return [learning_rate(schedule, peak, steps, step) for step in range(steps)]


@given(runs())
def test_schedules_drawn_here_are_valid(run: tuple[LearningRate, float, int]) -> None:
    schedule, _, steps = run
    assert validate(Config(schedule=schedule, train=Train(steps=steps))) == []


@given(runs())
def test_rates_lie_above_0_and_never_above_the_peak(run: tuple[LearningRate, float, int]) -> None:
    schedule, peak, steps = run
    found = rates(schedule, peak, steps)
    assert all(0 <= rate <= peak for rate in found)
    assert all(rate > 0 for rate in found[:-1])


@given(runs())
def test_warmup_is_an_even_rise_from_the_first_step(run: tuple[LearningRate, float, int]) -> None:
    schedule, peak, steps = run
    warm = rates(schedule, peak, steps)[: schedule.warmup]
    height = peak / (schedule.warmup + 1)
    assert warm == pytest.approx([height * (step + 1) for step in range(schedule.warmup)])


@given(runs())
def test_the_peak_is_reached_one_rise_after_warmup(run: tuple[LearningRate, float, int]) -> None:
    schedule, peak, steps = run
    if schedule.warmup < steps - 1 or schedule.name not in WITH_FLOOR:
        assert learning_rate(schedule, peak, steps, schedule.warmup) == pytest.approx(peak)


@given(runs())
def test_rates_never_rise_after_warmup(run: tuple[LearningRate, float, int]) -> None:
    schedule, peak, steps = run
    after = rates(schedule, peak, steps)[schedule.warmup :]
    assert all(later <= earlier for earlier, later in pairwise(after))


@given(runs(WITH_FLOOR))
def test_the_floor_is_where_the_run_ends_and_never_passed(run: tuple[LearningRate, float, int]) -> None:
    schedule, peak, steps = run
    after = rates(schedule, peak, steps)[schedule.warmup :]
    assert after[-1] == schedule.floor * peak
    assert all(rate >= schedule.floor * peak for rate in after)


@given(runs(("linear", "cosine")), st.integers(2, 50))
def test_no_step_falls_further_than_its_share(run: tuple[LearningRate, float, int], length: int) -> None:
    """Continuity: cosine is at most π/2 times as steep as a line."""
    schedule, peak, _ = run
    after = rates(replace(schedule, warmup=0), peak, length)
    largest = max(earlier - later for earlier, later in pairwise(after))
    assert largest <= peak * (1 - schedule.floor) / (length - 1) * math.pi / 2 * (1 + 1e-9) + 1e-15 * peak  # rounding


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LearningRate("constant", warmup=3), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        (LearningRate("linear", floor=0.2), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
        (LearningRate("linear", warmup=4, floor=0.0), [0.2, 0.4, 0.6, 0.8, 1, 0.75, 0.5, 0.25, 0]),
        (LearningRate("cosine", warmup=4, floor=0.0), [0.2, 0.4, 0.6, 0.8, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
        (LearningRate("cosine", warmup=6, floor=0.5), [1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7, 1, 0.75, 0.5]),
        (LearningRate("wsd", warmup=1, decay=4, floor=0.0), [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (LearningRate("wsd", warmup=7, decay=2, floor=0.5), [*(n / 8 for n in range(1, 9)), 0.5]),
        (LearningRate("inverse_sqrt", warmup=2), [1 / 3, 2 / 3, 1, *(math.sqrt(2 / step) for step in range(3, 9))]),
        (LearningRate("inverse_sqrt"), [1, 1, *(math.sqrt(1 / step) for step in range(2, 9))]),
    ],
    ids=lambda value: value.name if isinstance(value, LearningRate) else "",
)
def test_values_worked_out_by_hand(schedule: LearningRate, expected: list[float]) -> None:
    assert rates(schedule, 4.0, 9) == pytest.approx([4 * value for value in expected])


def test_wsd_decays_over_a_tenth_of_the_run_unless_told() -> None:
    found = rates(LearningRate("wsd", floor=0.0), 1.0, 100)
    assert found == pytest.approx([1.0] * 90 + [n / 10 for n in range(9, -1, -1)])


def test_wsd_does_not_decay_before_the_end_of_warmup() -> None:
    found = rates(LearningRate("wsd", warmup=95, floor=0.0), 1.0, 100)
    assert found[94:] == pytest.approx([95 / 96, 1, 0.75, 0.5, 0.25, 0])
