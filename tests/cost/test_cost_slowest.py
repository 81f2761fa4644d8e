"""Waiting for the slowest GPU: how much it is, and where it is counted."""

from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

import pytest

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.cost.cluster import Cluster, load_cluster
from megalite.cost.predict import predict
from megalite.cost.slowest_gpu import PUBLISHED_SPREAD, slowest, waiting
from megalite.cost.stages import Timer
from megalite.layout_search.search import search

H100 = load_cluster("h100_sxm")
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
        assert waiting(None, gpus) == waiting(0.0, gpus) == waiting(PUBLISHED_SPREAD, gpus) == 1.0
    assert waiting(0.05, 1) == 1.0
    by_gpus = [waiting(0.02, gpus) for gpus in (1, 8, 64, 4096)]
    by_spread = [waiting(value, 64) for value in (PUBLISHED_SPREAD, 0.02, 0.03, 0.1)]
    assert all(less < more for less, more in (*pairwise(by_gpus), *pairwise(by_spread)))
    assert waiting(0.02, 4096) == pytest.approx((1 + 0.02 * 3.61) / (1 + PUBLISHED_SPREAD * 3.61), rel=1e-3)


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
