"""The example of a loop of one's own trains, and does so alike in every layout."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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
    in_another = under_torchrun(4, "parallel.tp=2", "parallel.pp=2", "train.steps=20")
    assert in_another == alone(20, monkeypatch, capsys)


def test_it_trains_with_muon_on_several_ranks() -> None:
    assert under_torchrun(2, "parallel.tp=2", "optim.name=muon", "train.steps=60") < 0.5


def test_it_is_as_short_as_the_docs_say() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
