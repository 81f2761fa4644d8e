"""What a run takes: failures, checkpoints, days and money."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import Prediction, predict
from megalite.cost.whole_run import RESTART_SECONDS, goodput, run_of, stall
from megalite_launch.goodput.formulas import HOURS_BETWEEN_FAILURES, Costs, approximation, share

H100 = load_cluster("h100_sxm")


def prediction(gpus: int = 8, interval: int = 0, mode: str = "zero1") -> Prediction:
    keys = [f"batch.global={gpus}", "run.device=cuda", f"checkpoint.interval={interval}", f"parallel.data.mode={mode}"]
    return predict(check(load(["configs/model/llama3.2_1b.yaml"], keys), gpus), H100)


FEW, MANY = prediction(8), prediction(1024)


@given(st.floats(1.0, 1e15))
def test_money_and_energy_follow_gpu_hours(tokens: float) -> None:
    run = run_of(FEW, tokens)
    assert run.gpu_hours == pytest.approx(run.seconds * 8 / 3600)
    assert run.cost == pytest.approx(run.gpu_hours * H100.price)
    assert run.energy == pytest.approx(run.gpu_hours * H100.gpu.power)
    assert run.days == pytest.approx(run.seconds / 86_400)
    assert run.seconds * run.goodput == pytest.approx(tokens / FEW.step_tokens * FEW.seconds)


def test_more_gpus_lose_more_time_to_failures() -> None:
    assert 0.9 < goodput(MANY)[0] < goodput(FEW)[0] < 1


@given(st.integers(1, 100_000))
def test_no_interval_between_checkpoints_loses_less_than_the_chosen_one(steps: int) -> None:
    fixed = replace(MANY.config, checkpoint=replace(MANY.config.checkpoint, interval=steps))
    found, interval = goodput(replace(MANY, config=fixed))
    assert interval == pytest.approx(steps * MANY.seconds)
    assert found <= goodput(MANY)[0] * (1 + 1e-12)


def test_what_is_lost_adds_up() -> None:
    found, interval = goodput(MANY)
    between = HOURS_BETWEEN_FAILURES * 3600 / 1024
    costs = Costs(between, save=stall(MANY), restart=RESTART_SECONDS)
    assert found == share(costs, interval)  # megalite-goodput tells the same
    assert found == pytest.approx(approximation(costs, interval), abs=1e-4)


def test_an_automatic_interval_is_the_one_of_none() -> None:
    automatic = replace(MANY.config, checkpoint=replace(MANY.config.checkpoint, interval="auto"))
    assert goodput(replace(MANY, config=automatic)) == goodput(MANY)


def test_a_rank_copies_the_share_of_the_states_that_it_holds() -> None:
    assert stall(prediction(8, mode="ddp")) == pytest.approx(8 * stall(prediction(8, mode="zero3")))
