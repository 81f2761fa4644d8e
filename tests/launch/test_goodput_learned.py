"""Rates learned from a run's failures, and 200 simulated jobs that choose their intervals by it."""

from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite_launch.goodput.formulas import HOUR, HOURS_BETWEEN_FAILURES, Costs, best, between_failures, daly
from megalite_launch.goodput.learned import failure_rate, learned_interval

DAY = 86_400.0
MEASURED = 9  # steps of a start, after the last of which the first save comes


def chosen(failures: int, gpu_hours: float, gpus: int, save: float, write: float = 0.0) -> float:
    rate = failure_rate(failures, gpu_hours)
    return learned_interval(rate.mean, rate, gpu_hours, gpus, save, write)


def test_a_handful_of_failures_outweighs_what_was_known() -> None:
    """Eight GPUs that fail every two hours: the first hours and failures of the run."""
    assert failure_rate(1, 16).hours < 160
    for failures in (3, 10, 100):
        assert failure_rate(failures, 16 * failures).hours == pytest.approx(16, rel=0.45)
        best_seconds = best(Costs(2 * HOUR, save=10))
        assert chosen(failures, 16 * failures, 8, save=10) == pytest.approx(best_seconds, rel=0.25)


def test_survival_alone_is_believed_too() -> None:
    """Hours without a failure bring a run to the rate of a data center, and years beyond it."""
    hours = [failure_rate(0, gpu_hours).hours for gpu_hours in (0, 10, 1e3, 1e5, 1e7)]
    assert hours == sorted(hours)
    assert hours[3] > HOURS_BETWEEN_FAILURES
    assert hours[4] == pytest.approx(1e7, rel=0.05)


def test_the_rate_of_a_data_center_is_found_again() -> None:
    found = failure_rate(419, 54 * 24 * 16_384)
    assert found.hours == pytest.approx(HOURS_BETWEEN_FAILURES, rel=0.01)
    assert found.quantile(0.95) / found.quantile(0.05) == pytest.approx(exp(2 * 1.645 / 419**0.5), rel=0.01)


def test_quantiles_are_those_of_the_mixture() -> None:
    """Without a failure and without hours, it is one of exponential distributions."""
    found = failure_rate(0, 0.0)
    for probability in (0.05, 0.5, 0.95):
        rate = found.quantile(probability)
        below = sum(weight * (1 - exp(-rate * hours)) for weight, hours in found.parts)
        assert below == pytest.approx(probability)
    long = failure_rate(0, 1e9)  # the prior is nothing beside that
    assert long.quantile(0.05) == pytest.approx(-log(0.95) / 1e9, rel=0.05)


@given(st.integers(0, 50), st.floats(0, 1e6), st.integers(1, 16_384), st.floats(1e-3, 60), st.floats(0, 600))
def test_an_interval_keeps_its_bounds(failures: int, hours: float, gpus: int, save: float, write: float) -> None:
    """Three saves between the failures that were seen; before the first, 100 saves' time or what was survived."""
    found, survived = chosen(failures, hours * gpus, gpus, save, write), hours * HOUR
    ceiling = max(survived / failures / 3, save) if failures else max(100 * save, survived)
    assert write <= found <= max(ceiling, write) * (1 + 1e-9)
    rate = failure_rate(failures, hours * gpus)
    wanted = daly(Costs(between_failures(gpus, rate.hours), save, write))
    assert found == pytest.approx(max(min(wanted, ceiling), write))


class Job:
    """One that learns, and beside it the same with the best fixed interval; both meet the same failures."""

    def __init__(self, random: Random) -> None:
        self.gpus = round(10 ** random.uniform(0, 4.2))
        between, save = 10 ** random.uniform(2.8, 6), 10 ** random.uniform(-1.3, 2)  # 10 min to 12 days; 50 ms to 100 s
        write, restart = random.choice((0.0, min(between / 10, 60))), random.uniform(30, min(between, 600))
        self.costs = Costs(between, save, write, detect=10, restart=restart)
        self.step = min(10 ** random.uniform(-1, 1), between / 50)
        self.random, self.failures, self.clock, self.saved = random, 0, 0.0, 0.0

    def attempt(self) -> tuple[float, float, float]:
        """Seconds until the failure that ends it; what was saved of the work in them, and with the fixed interval."""
        of, trained = self.costs, self.random.expovariate(1 / self.costs.between)
        measured = MEASURED * self.step
        now, kept, done, each = 0.0, 0.0, 0.0, 1
        if not self.saved:
            now, done = measured + of.save, measured
            kept = done if now + of.write <= trained else 0.0
        while now < trained:  # decided anew after 1, 2, 4 … saves, which changes little and is faster
            ran = (self.clock + of.restart + max(now, measured)) * self.gpus / HOUR
            seconds = chosen(self.failures, ran, self.gpus, of.save, of.write)
            seconds = max(round(seconds / self.step), 1) * self.step
            saves = min(each, int(max(trained - of.write - now, 0) // (seconds + of.save)))
            kept, done = done + saves * seconds if saves else kept, done + saves * seconds
            now += saves * (seconds + of.save)
            if saves < each:
                break
            each *= 2
        self.failures += 1
        self.clock += of.restart + trained + of.detect
        self.saved += kept
        fixed = best(of)
        return trained, kept, max(trained - of.write, 0) // (fixed + of.save) * fixed


def test_200_jobs_learn_their_interval() -> None:
    """The bound of docs/goodput.md: from the tenth failure on a tenth of the best fixed interval's share, at most."""
    random, worst = Random(0), 1.0
    for _ in range(200):
        job = Job(random)
        first = [job.attempt()[0] for _ in range(2)]
        quick = (MEASURED + 1) * job.step + job.costs.save + job.costs.write
        assert job.saved or max(first) < quick  # no save can come before both
        for _ in range(8):
            job.attempt()
        found = [job.attempt() for _ in range(40)]
        worst = min(worst, sum(kept for _, kept, _ in found) / sum(fixed for _, _, fixed in found))
    assert worst > 0.9, worst
