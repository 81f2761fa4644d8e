"""`train.deterministic`: what it sets, what it refuses, and that nothing of a step objects to it."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from toy_jobs import config_of, one_rank
from toy_runs import run

from megalite.base.errors import InputError
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.rules.validate import validate
from megalite.distributed.deterministic import ALGORITHMS, CUBLAS, SWITCHES, be_deterministic
from megalite.distributed.start.ranks import RankInfo
from megalite.train import worker


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (CUBLAS, SWITCHES, ALGORITHMS):
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)


def applied() -> list[object]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(CUBLAS),
        os.environ.get(SWITCHES),
    ]


def test_two_runs_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    be_deterministic()
    assert applied() == [True, False, False, ":4096:8", "0"]
    with one_rank():
        notes = [run(config_of(Layout()), tmp_path / name)[0] for name in ("one", "other")]
    assert len(notes[0].curve("loss")) == 6
    for quantity in ("loss", "grad_norm", "parameter_norm"):
        assert notes[0].curve(quantity) == notes[1].curve(quantity)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_rank_applies_it_before_it_takes_its_device(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []

    def start(*_: object) -> None:
        found.extend(applied())
        raise InterruptedError

    config = load([], [f"run.dir={tmp_path}", f"train.deterministic={str(wanted).lower()}"])
    monkeypatch.setattr(worker, "start", start)
    for name in ("meet", "standard_streams", "LogFile", "logging"):
        monkeypatch.setattr(worker, name, MagicMock())
    monkeypatch.setattr(worker, "watched", lambda *_: nullcontext())
    with pytest.raises(InterruptedError):
        worker._watched(RankInfo(0, 1, 0), config, lambda: None)
    assert found == ([True, False, False, ":4096:8", "0"] if wanted else [False, False, True, None, None])


@pytest.mark.parametrize(
    ("name", "value"),
    [(CUBLAS, ":0:0"), (CUBLAS, ""), (SWITCHES, "1"), (ALGORITHMS, "NVLS"), (ALGORITHMS, "Ring,nvlstree")],
)
def test_an_environment_that_contradicts_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=rf"train\.deterministic = true: {name}={value} in the environment"):
        be_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("name", "value"), [(CUBLAS, ":16:8"), (ALGORITHMS, "Ring"), (ALGORITHMS, "^NVLS,Tree")])
def test_an_environment_that_agrees_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    be_deterministic()
    assert os.environ[name] == value


def test_kernels_that_promise_nothing_are_refused() -> None:
    apex = ["parallel.dp_shard=1", "train.deterministic=true", "kernels={rms_norm: apex}"]
    (problem,) = validate(load([], apex))
    assert "train.deterministic" in str(problem)
    assert "kernels.rms_norm = apex" in str(problem)
    assert validate(load([], apex[:2])) == []
