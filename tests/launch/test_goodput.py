"""The share of time that counts: formulas, and a simulation of the same model."""

from math import inf
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite_launch.goodput.formulas import (
    Costs,
    approximation,
    best,
    between_failures,
    daly,
    segment,
    share,
    young,
)
from megalite_launch.goodput.simulate import simulate

DAY = 86_400.0
GPUS = (256, 1024, 4096, 16_384)
SLOW = {"save": 60.0, "detect": 600.0, "restart": 421.0}
GOAL = {"save": 2.0, "write": 60.0, "detect": 60.0, "restart": 120.0}
COSTS = st.builds(
    Costs, st.floats(1e3, 1e8), st.floats(0.0, 300), st.floats(0.0, 300), st.floats(0.0, 1e3), st.floats(0.0, 1e3)
)


@pytest.mark.parametrize(
    ("gpus", "rare", "often", "goal", "minutes"),
    [
        (256, 98.6, 96.5, 99.7, 28),
        (1024, 95.9, 95.7, 99.4, 14),
        (4096, 86.0, 92.6, 98.5, 7),
        (16_384, 54.2, 81.6, 96.1, 3.5),
    ],
)
def test_what_was_known_of_runs_of_54_days(gpus: int, rare: float, often: float, goal: float, minutes: float) -> None:
    """Percent with a checkpoint each 3 h or 30 min, and with the goals of this project and Daly's interval."""
    slow = Costs(between_failures(gpus), **SLOW)
    wanted = Costs(between_failures(gpus), **GOAL)
    assert daly(wanted) / 60 == pytest.approx(minutes, rel=0.02)
    for costs, interval, percent in ((slow, 3 * 3600, rare), (slow, 1800, often), (wanted, daly(wanted), goal)):
        found = simulate(costs, interval, 54 * DAY, 60)
        end = interval / (54 * DAY)  # what the end of a run counts, though it is not saved
        assert abs(found.mean - share(costs, interval)) < 1.5 * found.error + end
        assert found.low - 0.002 < percent / 100 < found.high + 0.002


def test_the_goal_at_16384_gpus() -> None:
    costs = Costs(between_failures(16_384), **GOAL)
    found = simulate(costs, daly(costs), 54 * DAY, 1500)
    assert found.mean - found.error > 0.96
    assert found.failures == pytest.approx(419, rel=0.02)


def test_a_run_without_failures_waits_for_saves_alone() -> None:
    found = simulate(Costs(inf, save=10, write=5), 90, 1000, 3)
    assert (found.mean, found.low, found.high, found.failures) == (0.9, 0.9, 0.9, 0)
    assert share(Costs(inf, save=10), 90) == 0.9
    assert share(Costs(inf), best(Costs(inf))) == 1


@given(st.integers(0, 2**32), st.floats(20, 2000), st.floats(0, 50), st.floats(0, 20))
def test_a_simulated_run_is_what_it_is_second_by_second(seed: int, between: float, save: float, write: float) -> None:
    """The simulation jumps from failure to failure; this one goes from save to save."""
    costs, interval, seconds = Costs(between, save, write, 30, 40), 60.0, 5000.0
    random, clock, durable = Random(seed), 0.0, 0.0
    while clock < seconds:  # from a restart, at `durable` seconds of work, to a failure
        end, now, done, pending = clock + random.expovariate(1 / between), clock, durable, [(clock, durable)]
        while now + interval + save <= min(end, seconds):
            now, done = now + interval + save, done + interval
            pending.append((now + write, done))
        if end >= seconds:
            durable = done + min(seconds - now, interval)
            break
        durable = max(work for known, work in pending if known <= end or work == durable)
        clock = end + 70
    assert simulate(costs, interval, seconds, 1, seed).mean == pytest.approx(durable / seconds, abs=1e-9)


@pytest.mark.parametrize("interval", [50.0, 300.0, 1500.0])
def test_the_expected_time_between_checkpoints(interval: float) -> None:
    """Drawn one by one: failures come in training and saving, and each costs detection and restart."""
    costs, random = Costs(600, save=7, detect=20, restart=30), Random(1)

    def drawn() -> float:
        clock = 0.0
        while (until := random.expovariate(1 / costs.between)) < interval + costs.save:
            clock += until + costs.detect + costs.restart
        return clock + interval + costs.save

    found = [drawn() for _ in range(20_000)]
    assert mean(found) == pytest.approx(segment(costs, interval), rel=0.04)
    assert share(costs, interval) == pytest.approx(interval / segment(costs, interval))


@given(COSTS, st.floats(0.01, 10))
def test_no_interval_counts_more_than_the_best(costs: Costs, times: float) -> None:
    if costs.save == 0:
        return
    found = best(costs)
    other = max(found * times, costs.write)
    assert share(costs, other) <= share(costs, found) * (1 + 1e-9)


@given(st.floats(1e4, 1e8), st.floats(0.001, 60))
def test_the_formulas_agree_where_failures_are_rare(between: float, save: float) -> None:
    costs = Costs(between, save=save, restart=10)
    assert daly(costs) == pytest.approx(best(costs), rel=2e-3)
    assert young(costs) == pytest.approx(daly(costs) + save, rel=0.03)
    assert approximation(costs, best(costs)) == pytest.approx(
        share(costs, best(costs)), abs=2 * save / between + 1e-5 + 0.01 * (save / between) ** 0.5
    )


def test_an_interval_is_not_shorter_than_writing() -> None:
    costs = Costs(between_failures(16_384), save=0.01, write=300)
    assert young(costs) < 60
    assert daly(costs) == best(costs) == 300
    assert daly(Costs(100, save=1000)) == 100


def test_an_interval_without_end_counts_nothing() -> None:
    assert share(Costs(1.0, save=1), 1e9) == 0
