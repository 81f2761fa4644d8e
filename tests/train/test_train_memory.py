"""What is refused or told before ranks start."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.commands import main, train
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.distributed.start.start import explain
from megalite.train.worker import explained


def test_a_model_too_big_for_the_machine_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_first_step", lambda *_: 0)
    monkeypatch.setattr(train, "check_files", lambda config: None)
    run = [f"run.dir={tmp_path / 'runs'}", "run.device=cpu"]
    assert main.main(["train", *run, "model.width=65536", "model.layers=100"]) == 2
    told = capsys.readouterr().err
    assert "all ranks together would need" in told
    assert "of this machine's memory (of the fullest rank: host memory" in told
    assert not (tmp_path / "runs").exists()


RANK_1 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "arguments", "told"),
    [
        (
            {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            [],
            "RANK=5 WORLD_SIZE=2 LOCAL_RANK=0: ranks are counted",
        ),
        ({"WORLD_SIZE": "2"}, [], "WORLD_SIZE=2: RANK and LOCAL_RANK must be set too"),
        (RANK_1 | SLURM | {"WORLD_SIZE": "2"}, ["--world-size=2"], "two launchers give this process two places"),
        (RANK_1, ["--world-size=8"], "--world-size 8: WORLD_SIZE, or srun, says that this is one of 4 ranks; start"),
        (RANK_1, ["parallel.tp=3"], "which must divide the job's 4"),
    ],
)
def test_a_check_minds_the_launcher_around_it(
    environment: dict[str, str],
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main.main(["train", "--check", *arguments]) == 2
    assert told in capsys.readouterr().err


def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> int:
    """Of a configuration with a doubt, and no memory to hold it."""
    for name in ("check_files", "_first_step", "check_start", "die_with_launcher", "end_when_stopped"):
        monkeypatch.setattr(train, name, lambda *_: 0)
    monkeypatch.setattr(train, "host_memory", lambda: 1)
    monkeypatch.setattr(train, "import_for_good", lambda name: SimpleNamespace(run=lambda *_: 0))
    settings = [f"run.dir={tmp_path / 'runs'}", "run.device=cpu", "train.steps=10", "schedule.warmup=10"]
    return main.main(["train", *settings, "batch.global=4", *arguments])


@pytest.mark.parametrize(
    ("environment", "times"),
    [
        (RANK_1 | {"RANK": "0", "LOCAL_RANK": "0"}, 1),
        (RANK_1, 0),
        (RANK_1 | {"RANK": "0", "LOCAL_RANK": "0", "MEGALITE_LAUNCHER": str(os.getpid())}, 0),
    ],
    ids=["rank 0", "rank 1", "rank 0 of the local launcher"],
)
def test_doubts_are_told_once_under_every_launcher(
    environment: dict[str, str],
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert checked(monkeypatch, tmp_path) == 0
    assert capsys.readouterr().err.count("warning: schedule.warmup = 10: lasts all of train.steps = 10") == times


def test_ranks_that_may_be_on_other_hosts_are_not_compared_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(monkeypatch, tmp_path, "--check") == 2
    assert "of this machine's memory" in capsys.readouterr().err
    assert checked(monkeypatch, tmp_path, "--check", "--world-size=1") == 0


def test_a_full_gpu_is_told_what_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = check(load([], ["run.device=auto", "batch.global=32", "batch.micro=8"]), 1)
    properties = SimpleNamespace(total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with pytest.raises(torch.OutOfMemoryError) as caught, explained(config, torch.device("cuda", 0)):
        raise torch.OutOfMemoryError("CUDA out of memory")
    code, text = explain(caught.value)
    assert code == 1
    assert "OutOfMemoryError: CUDA out of memory\nout of memory: pipeline rank 0 needs " in text
    with pytest.raises(ValueError, match=r"^another$"), explained(config, torch.device("cuda", 0)):
        raise ValueError("another")
