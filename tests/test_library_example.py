"""The example of a loop of one's own trains, and does so alike in every layout."""

import os
import runpy
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from warm_start import Popen

EXAMPLE = Path(__file__).parents[1] / "docs/library_example.py"


def loss_in(told: str) -> float:
    *_, last = told.splitlines()
    assert last.startswith("loss on new numbers ")
    return float(last.split()[-1])


def alone(steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> float:
    """The loss of one rank, which is this process."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), f"train.steps={steps}"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return loss_in(capsys.readouterr().out)


def as_under_torchrun(ranks: int, *overrides: str) -> float:
    """The loss of ranks that know of each other what torchrun tells, from the environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        programs = []
        for rank in map(str, range(ranks)):
            environment = {**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank}
            program = Popen([str(EXAMPLE), *overrides], env=environment, stdout=subprocess.PIPE)
            programs.append(stack.enter_context(program))
            stack.callback(program.kill)
        told = [program.communicate(timeout=200)[0] for program in programs]
    assert [program.returncode for program in programs] == [0] * ranks
    return loss_in(told[0])


def under_torchrun(ranks: int, *overrides: str) -> float:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    call = [sys.executable, *torchrun, str(EXAMPLE), *overrides]
    done = subprocess.run(call, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return loss_in(done.stdout)


def test_it_learns_to_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert alone(60, monkeypatch, capsys) < 0.5


def test_it_learns_as_well_in_another_layout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_another = as_under_torchrun(4, "parallel.tp=2", "parallel.pp=2", "train.steps=20")
    assert in_another == alone(20, monkeypatch, capsys)


def test_it_trains_with_muon_on_several_ranks() -> None:
    assert under_torchrun(2, "parallel.tp=2", "optim.name=muon", "train.steps=60") < 0.5


def test_it_is_as_short_as_the_docs_say() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
