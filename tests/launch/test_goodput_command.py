"""`megalite-goodput`: simulations, and advice for a run."""

import json
from pathlib import Path

import pytest
from made_up_run import MadeUp, made_up

from megalite_launch import commands
from megalite_launch.goodput.learned import failure_rate, learned_interval

GOAL = [
    "simulate",
    "--save-seconds",
    "2",
    "--write-seconds",
    "60",
    "--detect",
    "60",
    "--restart",
    "120",
    "--runs",
    "30",
]


def test_sizes_of_jobs_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("goodput", [*GOAL, "--gpus", "256,16384", "--json"]) == 0
    few, many = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert few["gpus"] == 256
    assert few["goodput"] == pytest.approx(0.997, abs=0.001)
    assert many["goodput"] == pytest.approx(0.960, abs=0.002)
    assert many["goodput"] == pytest.approx(many["exact"], abs=2 * many["error"])
    assert many["interval"] == many["daly"] == pytest.approx(209.7, abs=0.1)
    assert commands.run("goodput", [*GOAL, "--gpus", "16384", "--interval", "1800"]) == 0
    text = capsys.readouterr().out
    assert "30 min" in text
    assert "30 runs of 54 days" in text


def test_seeds_and_rates_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    def goodput(*more: str) -> float:
        assert commands.run("goodput", [*GOAL, "--gpus", "1024", "--json", *more]) == 0
        found: float = json.loads(capsys.readouterr().out)["goodput"]
        return found

    assert goodput() == goodput("--seed", "0") != goodput("--seed", "1")
    assert goodput("--mtbf-gpu-hours", "1000") < 0.95 < goodput()
    assert goodput("--days", "1", "--mtbf-gpu-hours", "1e8") > goodput()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "--gpus 0: must be numbers from 1"),
        (["--gpus", "8,x"], "--gpus 8,x: must be numbers"),
        (["--gpus", "8", "--interval", "30"], "--interval 30: must be at least --write-seconds = 60"),
        (["--gpus", "8", "--interval", "often"], "--interval often: must be auto, or seconds"),
        (["--gpus", "8", "--days", "nan"], "--days nan: must be from"),
        (["--gpus", "8", "--restart", "-1"], "--restart -1: must be from 0"),
        (["--gpus", "8", "--runs", "1"], "--runs 1: must be from 2"),
        (["--gpus", "16777216", "--runs", "100000"], "failures; use fewer than"),
        (["--gpus", "8", "--save-seconds", "0", "--write-seconds", "0"], "--interval auto: saves that cost nothing"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("goodput", [*GOAL, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_run_is_accounted_for_and_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up(tmp_path / "run")
    assert commands.run("goodput", [str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["accounts"].values()) == pytest.approx(found["wall"])
    advised = found["advice"]
    rate = failure_rate(2, advised["rank_hours"])
    step = advised["step_seconds"]
    assert advised["steps"] == round(learned_interval(rate.mean, rate, advised["rank_hours"], 16, 1.5, 20.0) / step)
    assert advised["hours_between_failures"] == pytest.approx(advised["rank_hours"] / 2, rel=0.5)
    fewest, most = advised["steps_between"]
    assert fewest < advised["steps"] < most
    assert commands.run("goodput", [str(tmp_path / "run")]) == 0
    assert f"advice: checkpoint.interval={advised['steps']}, " in capsys.readouterr().out


def test_without_a_save_nothing_is_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeUp(tmp_path / "run")
    run.job(0, 5)
    assert commands.run("goodput", [str(tmp_path / "run")]) == 0
    assert "no interval can be advised: a step has not been measured yet" in capsys.readouterr().out
    run.attempt("1.0.0", 20)
    assert commands.run("goodput", [str(tmp_path / "run")]) == 0
    assert "no interval can be advised: a checkpoint has not been measured yet" in capsys.readouterr().out
    assert commands.run("goodput", [str(tmp_path / "no")]) == 2
