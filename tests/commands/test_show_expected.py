"""`megalite show`, the section "Expected"."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.commands.main import main
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import predict
from megalite.cost.whole_run import run_of

LLAMA3_8B = str(Path(__file__).parents[2] / "configs/run/llama3_8b_64gpu.yaml")
LLAMA3_405B = str(Path(__file__).parents[2] / "configs/run/llama3_405b_16384gpu.yaml")
Show = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """The text of the section of these arguments."""

    def run(*arguments: str) -> str:
        assert main(["show", *arguments]) == 0
        return capsys.readouterr().out.partition("\nExpected")[2]

    return run


def test_without_a_cluster_the_usual_gpus_are_told(show: Show) -> None:
    rows = re.findall(r"(\d+) GiB +\S+ GiB +(\S+) GiB +(fits|does not fit)", show(LLAMA3_8B, "--world-size", "64"))
    assert [(size, verdict) for size, _, verdict in rows] == [
        ("24", "does not fit"),
        ("40", "does not fit"),
        ("80", "fits"),
        ("141", "fits"),
        ("192", "fits"),
    ]
    assert all(40 * 0.9 < float(needed) <= 80 * 0.9 for _, needed, _ in rows)


def test_on_a_cluster_it_is_the_planners_prediction(show: Show) -> None:
    told = show(LLAMA3_8B, "--cluster", "h100_sxm", "--world-size", "64")
    config = check(load([LLAMA3_8B], ["run.device=cuda"]), 64)
    prediction = predict(config, load_cluster("h100_sxm"))
    run = run_of(prediction, config.train.steps * prediction.step_tokens)
    assert told.startswith(" on 64 × NVIDIA H100 SXM5 80 GB (h100_sxm)\n")
    facts = dict(re.findall(r"^(\S.*?)  +(\S.*?) *$", told, re.MULTILINE))
    assert facts["memory"].startswith("fits: ")
    seconds, low, high = map(float, re.findall(r"[\d.]+", facts["step"]))
    assert [seconds, low, high] == pytest.approx([prediction.seconds, prediction.low, prediction.high], rel=0.005)
    assert facts["tokens/s/GPU"] == f"{prediction.tokens_per_second:,.0f}"
    assert facts["MFU"].startswith(f"{prediction.mfu:.1%} ")
    assert facts["240,000 steps"].startswith(f"{run.days:.1f} days")
    assert facts["GPU-hours"] == f"{run.gpu_hours:,.0f}"
    assert facts["cost"].startswith(f"${run.cost:,.0f} at $3.99 ")


def test_a_tiny_run_has_digits_too(show: Show) -> None:
    told = show("configs/model/tiny.yaml", "--cluster", "h100_sxm", "train.steps=10")
    assert re.search(r"fits: [\d.]+ MiB of 71.7 GiB", told)
    assert re.search(r"GPU-hours +7\.\d\de-05 ", told)
    assert re.search(r"cost +under \$0.01 at", told)


def test_a_smaller_gpu_does_not_fit(show: Show) -> None:
    assert "does not fit: " in show(LLAMA3_8B, "--cluster", "a100_40gb", "--world-size", "64")


def test_micro_batches_are_fitted_to_the_cluster(show: Show) -> None:
    arguments = (LLAMA3_8B, "batch.micro=auto", "--world-size", "64", "--cluster")
    small, large = (re.findall(r"fits: (\S+) GiB", show(*arguments, name)) for name in ("h100_sxm", "mi300x"))
    assert float(small[0]) < 72 < float(large[0])


def test_long_schedules_are_not_walked_but_timed(show: Show) -> None:
    told = show(LLAMA3_405B, "--cluster", "h100_sxm", "--world-size", "512", "batch.global=2048")
    assert "Memory is not predicted here" in told
    assert re.search(r"^step +[\d,.]+ s ", told, re.MULTILINE)


def test_growing_batches_are_noted(show: Show) -> None:
    arguments = (LLAMA3_8B, "--cluster", "h100_sxm", "--world-size", "64")
    note = "Smaller batches and shorter sequences at the beginning are counted"
    assert note in show(*arguments, "batch.rampup.start=128", "batch.rampup.tokens=1000000000")
    assert note not in show(*arguments)


def test_a_cpus_configuration_has_no_gpus(show: Show) -> None:
    assert show("run.device=cpu") == ""
    assert show("run.device=cuda") != ""


def test_the_configuration_is_shown_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", LLAMA3_8B, "--cluster", "h100_sxm", "--world-size", "64"]) == 0
    told = capsys.readouterr().out
    assert "  device: auto\n" in told
    assert "assumed" not in told


def test_memory_is_compared_with_the_gpus_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", LLAMA3_8B, "--world-size", "8", "--memory", "--cluster", "h100_sxm"]) == 0
    assert "fits the 71.7 GiB that tensors may take of NVIDIA H100 SXM5 80 GB (h100_sxm)." in capsys.readouterr().out
    assert main(["show", LLAMA3_8B, "--world-size", "8", "--memory", "run.cluster=rtx4090"]) == 0
    assert "does not fit the 21.6 GiB that tensors may take of NVIDIA GeForce RTX 4090" in capsys.readouterr().out


def test_a_timeline_is_searched_for_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["show", "parallel.pp=2", "batch.global=8", "parallel.pipeline.schedule=auto"]
    assert main([*auto, "--cluster", "h100_sxm", "--schedule"]) == 0
    there = capsys.readouterr().out
    assert "Stages take the time that is predicted on h100_sxm, and a rank may hold the activations that" in there
    seconds = float(re.search(r"makespan ([\d.]+)", there)[1])  # type: ignore[index]
    milliseconds = float(re.search(r"the passes take ([\d.]+) ms", there)[1])  # type: ignore[index]
    assert milliseconds == pytest.approx(1000 * seconds, rel=0.01)
    assert main([*auto, "run.cluster=h100_sxm", "--schedule"]) == 0
    assert capsys.readouterr().out == there
    assert main([*auto, "--schedule"]) == 0
    assert "Stages take the time of their FLOPs" in capsys.readouterr().out


def test_an_unknown_cluster_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--cluster", "h99"]) == 2
    assert (
        "--cluster h99: is no file, and no cluster that megalite comes with; `megalite list`" in capsys.readouterr().err
    )
