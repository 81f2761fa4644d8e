"""Waiting for the slowest GPU: how much it is, where it is counted, and that published rows are not told it twice."""

from dataclasses import replace
from itertools import pairwise
from math import exp
from pathlib import Path
from statistics import NormalDist

import pytest

from megalite.config.load import load
from megalite.config.validate import check
from megalite.planner.hardware import Cluster, load_cluster
from megalite.planner.predict import predict
from megalite.planner.published import read_rows
from megalite.planner.score import Compared, timed, trend
from megalite.planner.search import search
from megalite.planner.slowest import PUBLISHED, slowest, waiting
from megalite.planner.stages import Timer

H100 = load_cluster("h100_sxm")
FILES = sorted(Path(__file__).with_name("published").glob("*.csv"))
MODEL = ["configs/model/llama3.2_1b.yaml"]
GIVEN = ["run.device=cuda", "train.precision=bf16", "batch.global=64"]


def spread(value: float | None) -> Cluster:
    return replace(H100, gpu=replace(H100.gpu, spread=value))


def largest_of(count: int) -> float:
    """The expected largest of normal deviates: an integral over what is above and below 0."""
    step, found = 1e-3, 0.0
    for at in range(round(9 / step)):
        x = (at + 0.5) * step
        found += (1 - NormalDist().cdf(x) ** count - NormalDist().cdf(-x) ** count) * step
    return found


@pytest.mark.parametrize(("gpus", "within"), [(1, 0), (2, 0.05), (4, 0.02), (8, 0.01), (512, 0.01), (16_384, 0.01)])
def test_the_slowest_is_the_expected_largest_deviation(gpus: int, within: float) -> None:
    assert slowest(gpus) == pytest.approx(largest_of(gpus), rel=within, abs=1e-9)


def test_more_spread_and_more_gpus_wait_longer() -> None:
    for gpus in (1, 8, 4096):
        assert waiting(None, gpus) == waiting(0.0, gpus) == waiting(PUBLISHED, gpus) == 1.0
    assert waiting(0.05, 1) == 1.0
    by_gpus = [waiting(0.02, gpus) for gpus in (1, 8, 64, 4096)]
    by_spread = [waiting(value, 64) for value in (PUBLISHED, 0.02, 0.03, 0.1)]
    assert all(less < more for less, more in (*pairwise(by_gpus), *pairwise(by_spread)))
    assert waiting(0.02, 4096) == pytest.approx((1 + 0.02 * 3.61) / (1 + PUBLISHED * 3.61), rel=1e-3)


def test_a_step_waits_for_the_slowest_gpu_of_a_measured_cluster() -> None:
    config = check(load(MODEL, [*GIVEN, "parallel.tp=2"]), 64)
    usual, measured = predict(config, H100), predict(config, spread(0.03))
    assert usual.parts["slowest"] == 0
    assert measured.seconds == pytest.approx(waiting(0.03, 64) * usual.seconds)
    assert measured.seconds == pytest.approx(sum(measured.parts.values()))
    assert measured.mfu == pytest.approx(usual.mfu / waiting(0.03, 64))
    alone = check(load(MODEL, GIVEN), 1)
    assert predict(alone, spread(0.03)).seconds == predict(alone, H100).seconds


def test_the_order_of_layouts_stays() -> None:
    config, limit = load(MODEL, GIVEN), 70 * 2**30
    usual, measured = (search(config, 16, Timer(cluster), limit, wanted=20) for cluster in (H100, spread(0.05)))
    assert [each.choice for each in measured.results] == [each.choice for each in usual.results]
    longer = [after.seconds / before.seconds for after, before in zip(measured.results, usual.results, strict=True)]
    assert longer == pytest.approx([waiting(0.05, 16)] * 20)


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    return timed(row for file in FILES for row in read_rows(file)[0])


def test_published_rows_tell_the_spread_that_predictions_contain(rows: list[Compared]) -> None:
    found = trend(rows)
    assert found is not None
    assert found.spread == pytest.approx(PUBLISHED, abs=5e-4)
    assert found.spread < 2 * found.error  # so that it may well be nothing
    assert found.sources == 19


def test_a_trend_is_found_again(rows: list[Compared]) -> None:
    before = trend(rows)
    slower = [replace(each, measured=each.measured * exp(0.03 * slowest(each.row.work.gpus))) for each in rows]
    after = trend(slower)
    assert before is not None
    assert after is not None
    assert after.spread == pytest.approx(before.spread + 0.03, rel=1e-6)
    assert after.error == pytest.approx(before.error, rel=1e-6)
    assert trend([each for each in rows if each.row.source == "llm-foundry MPT"]) is None
