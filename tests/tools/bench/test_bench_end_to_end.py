"""The measurement of `megalite train` as users run it, on a model too small to tell anything about time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.base.errors import InputError
from megalite.config.schema import Config
from megalite.train.folder.records import WARM_UP_STEPS
from megalite_tools.bench.training import end_to_end
from megalite_tools.bench.training.end_to_end import RESUMED_STEPS, Start, measure

SIZES = {"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 96, "sequence_length": 64}
TINY = [f"model.{key}={value}" for key, value in SIZES.items()]
TINY += ["batch.micro=8", "batch.global=8", "train.precision=fp32", "optim.lr=0.01", "schedule.name=constant"]
TINY += ["log.tensorboard=false"]
STEPS = 13  # an odd number: the save in the middle comes after step 7
LAST = STEPS + RESUMED_STEPS
ENDLESS = """
import sys
from pathlib import Path
from megalite_tools.bench.training.end_to_end import measure
measure(sys.argv[2:], Path(sys.argv[1]), "cpu", 20000, print)
"""


def ignore(result: dict[str, Any]) -> None:
    """Take the figures of a start, for tests that do not look at them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end_to_end")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """What was noted after each start."""
    found: list[dict[str, Any]] = []
    assert measure(TINY, folder, "cpu", STEPS, found.append) == found[-1]
    return found


def test_second_start_continues_the_first(results: list[dict[str, Any]]) -> None:
    before, after = results
    assert (before["exit_codes"], after["exit_codes"]) == ([0], [0, 0])
    assert list(before["losses"]) == list(range(1, STEPS + 1))
    assert list(after["losses"]) == list(range(1, LAST + 1))
    assert [(start["first_step"], start["last_step"]) for start in after["starts"]] == [(1, STEPS), (STEPS + 1, LAST)]
    losses = after["losses"]
    assert abs(losses[STEPS + 1] - losses[STEPS]) < (losses[1] - losses[STEPS]) / 2
    for start in after["starts"]:
        parts = [start[name] for name in ("seconds_to_first_step", "first_step_seconds", "seconds_after_last_step")]
        assert min(parts) > 0
        assert sum(parts) < start["seconds"]


def test_saves_are_counted_and_deleted(results: list[dict[str, Any]], folder: Path) -> None:
    before, after = results
    assert [save["step"] for save in before["saves"]] == [7, STEPS]
    assert [save["step"] for save in after["saves"]] == [7, STEPS, LAST]
    state = 12 * after["parameters"]
    for save in after["saves"]:
        assert save["bytes"] > state
        assert 0 <= save["waited_seconds"] < save["stall_seconds"] < save["complete_seconds"]
        assert save["bytes_per_second"] == pytest.approx(save["bytes"] / save["write_seconds"])
    disk = after["disk"]
    assert after["saves"][-1]["bytes"] < disk["checkpoints_bytes"] < 2 * state  # one checkpoint, and its manifest
    assert disk["free_bytes"] > disk["needed_bytes"] > 2 * state
    assert not list(folder.rglob("step-*"))
    assert not (folder / "run" / "checkpoints").exists()


def test_all_steps_after_the_warm_up_are_timed(results: list[dict[str, Any]]) -> None:
    result = results[-1]
    assert result["steps"] + result["during_save"]["steps"] == LAST - 2 * WARM_UP_STEPS
    assert result["during_save"]["steps"] >= 1
    assert result["tokens_per_step"] == 8 * 64
    for speed in (result, result["during_save"]):
        for name in ("step_ms", "wall_ms", "data_wait_ms"):
            assert 0 < speed[name]["p10"] <= speed[name]["median"] <= speed[name]["p90"]
        assert speed["tokens_per_second"] == pytest.approx(8 * 64e3 / speed["wall_ms"]["median"])


def test_steps_and_saves_that_overlap() -> None:
    result = end_to_end._figures(_two_saves(), [Start(80.0, 130.0, 0)], Config())
    assert (result["steps"], result["during_save"]["steps"]) == (2, 3)  # 6 and 10; 7, 8 and 9
    for speed in (result, result["during_save"]):
        assert speed["wall_ms"] == pytest.approx({"p10": 1000, "median": 1000, "p90": 1000})
        assert speed["step_ms"]["median"] == pytest.approx(900)
    first, second = result["saves"]
    assert (first["stall_seconds"], first["waited_seconds"], first["complete_seconds"]) == pytest.approx((2, 0, 5.5))
    assert (second["stall_seconds"], second["waited_seconds"], second["complete_seconds"]) == pytest.approx(
        (2, 1.5, 2.5)
    )
    (start,) = result["starts"]
    assert start["seconds_to_first_step"] == pytest.approx(20.1)
    assert start["seconds_after_last_step"] == pytest.approx(16)
    assert result["peak_memory_bytes"] == 7


def test_nothing_is_told_of_steps_that_were_not_taken() -> None:
    result = end_to_end._figures(_two_saves()[:WARM_UP_STEPS], [Start(80.0, 130.0, 0)], Config())
    assert (result["steps"], result["step_ms"], result["tokens_per_second"], result["saves"]) == (0, None, None, [])


def test_a_save_that_failed_is_an_error() -> None:
    failed = {"step": 8, "time": 110.5, "event": "save_failed", "checkpoint": 6, "error": "No space left on device"}
    with pytest.raises(RuntimeError, match="checkpoint of step 6 could not be saved: No space left"):
        end_to_end._figures([*_two_saves(), failed], [Start(80.0, 130.0, 0)], Config())


def test_a_start_that_begins_anew_is_an_error() -> None:
    anew = [*_two_saves(), {"step": 0, "time": 120.0, "event": "resumed"}, *_two_saves()]
    with pytest.raises(RuntimeError, match=r"did not continue the one before: .* 9, 10, 1, 2,"):
        end_to_end._figures(anew, [Start(80.0, 130.0, 0)] * 2, Config())


def _two_saves() -> list[dict[str, Any]]:
    """Lines of ten steps of 1 s, the first from 100 to 101 s. After steps 6 and 8, training stands still for 2 s.

    The first save is written from 108 to 111.5 s. The second one begins at 110 s, waits for it, is staged until 112 s,
    and written until 112.5 s.
    """
    record = {"loss": 4.0, "step_seconds": 0.9, "data_wait_seconds": 0.01, "peak_memory_bytes": 7.0}
    lines: list[dict[str, Any]] = []
    for step in range(1, 11):
        lines.append({"step": step, "time": 100.0 + step + 2 * (step > 6) + 2 * (step > 8), **record})
        if step in (6, 8):
            event = {"step": step, "event": "saving", "checkpoint": step, "blocked": 2.0}
            lines.append({**event, "time": lines[-1]["time"] + 2})
        if step in (8, 9):
            saved, seconds = {8: (6, 3.5), 9: (8, 0.5)}[step]
            event = {"step": step, "event": "saved", "checkpoint": saved, "bytes": 100, "seconds": seconds}
            lines.append({**event, "time": lines[-1]["time"]})
    return lines


def test_failing_start_is_told_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    broken = tmp_path / "run" / "checkpoints" / "step-00000003"
    broken.mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"(?s)exit code 2: .*step-00000003"):
        measure(TINY, tmp_path, "cpu", STEPS, ignore)
    assert (tmp_path / "stderr.txt").exists()
    assert not broken.parent.exists()


@pytest.mark.parametrize(("precision", "bytes_of_parameter"), [("fp32", 24), ("fp64", 48)])
def test_too_little_room_is_refused_before_anything_starts(
    precision: str, bytes_of_parameter: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = end_to_end.model_parameters(Config().model).total
    needed = bytes_of_parameter * parameters + end_to_end.SLACK
    settings = [f"train.precision={precision}"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    end_to_end._check_room(end_to_end._config(settings, tmp_path, "cpu"), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(InputError, match="are free, but two checkpoints"):
        measure(settings, tmp_path, "cpu", STEPS, ignore)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_leaves_neither_processes_nor_checkpoints(number: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path), *TINY], stderr=subprocess.DEVNULL)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
        assert len(_processes_of(tmp_path)) == 3  # the one started here, the launcher and its rank
        process.send_signal(number)
        assert process.wait(20) != 0
        assert not _processes_of(tmp_path)
        assert not (tmp_path / "run" / "checkpoints").exists()
    finally:
        process.kill()


def _processes_of(folder: Path) -> list[str]:
    """The living processes whose command line names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if os.fsencode(folder) in line:
            found.append(path.parent.name)
    return found
