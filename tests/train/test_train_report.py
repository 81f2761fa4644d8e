"""What a run reports is the same everywhere: console, metrics.jsonl and TensorBoard."""

import errno
import json
import math
import os
import time
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest
from rich.text import Text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.base.errors import InputError
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Config, Log, Run, Train
from megalite.train.folder.records import read_lines, read_records, restore_end
from megalite.train.report import CONSOLE_FIELDS, Report

CONFIG = Config(run=Run(name="toy"), parallel=Parallel(pp=2, dp_shard=3), train=Train(steps=20))
RECORDS = {
    5: {
        "loss": 2.5,
        "grad_norm": 0.75,
        "learning_rate": 3e-4,
        "step_seconds": 0.3125,
        "peak_memory_bytes": 2.5e9,
        "tokens/data/a": 30720,
        "tokens_per_second": 12345.5,
        "tflops_per_device": 0.25,
        "mfu": 0.4375,
    },
    10: {
        "loss": 2.25,
        "grad_norm": 0.5,
        "learning_rate": 2e-4,
        "tokens_per_second": 1e5,
        "tflops_per_device": 0.5,
        "expert_load": 1.75,
    },
    15: {"valid_loss": 2.0, "valid_perplexity": 7.389},
}


def write(folder: Path, config: Config, records: dict[int, dict[str, float]], first_step: int = 0) -> None:
    with Report(folder, config, first_step) as report:
        for step, values in records.items():
            report.record(step, values)


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def board(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_metrics_and_tensorboard_agree(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, RECORDS)
    found = lines(tmp_path)
    assert {line["step"]: {name: line[name] for name in RECORDS[line["step"]]} for line in found} == RECORDS
    assert all(line.keys() - {"step", "time"} == RECORDS[line["step"]].keys() for line in found)
    drawn = board(tmp_path)
    assert drawn.keys() == CONSOLE_FIELDS.keys() | {"tokens/data/a"}
    for step, record in RECORDS.items():
        for name, value in record.items():
            assert drawn[name][step] == pytest.approx(value, rel=1e-6), name  # TensorBoard keeps float32


def test_records_tell_when_they_were_made(tmp_path: Path) -> None:
    before = time.time()
    write(tmp_path, CONFIG, RECORDS)
    times = [line["time"] for line in lines(tmp_path)]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= time.time()


def test_a_line_nested_too_deep_is_cut_off_or_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("[" * 100_000)
    assert (restore_end(path) or "").startswith("[[")
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(InputError, match="line 1 is not a record of a run"):
        read_lines(path)


def test_records_in_a_pipe_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match="is no regular file"):
        read_lines(path)


def test_records_without_an_end_are_refused_and_not_read(tmp_path: Path) -> None:
    """A file with a hole, whose bytes would fill the memory."""
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="line 1 is not a record of a run"):
        read_lines(path)
    with pytest.raises(InputError, match="ends in a line of more bytes than any record has"):
        restore_end(path)
    assert path.stat().st_size == 2**40


def test_the_console_names_every_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, CONFIG, RECORDS)
    shown = capsys.readouterr().out
    first, second, third = (line.split("  ETA")[0] for line in shown.splitlines())
    assert first == "step  5/20  loss  2.5000  norm  0.750  lr 3.0e-04   312 ms  12.3 ktok/s  MFU 43.8%  2.50 GB"
    assert second.endswith("load 1.75")
    assert "100 ktok/s  500 GFLOP/s" in second.replace("   ", "  ")
    assert third == "step 15/20  valid loss 2.0000  perplexity 7.389"


def test_a_record_fits_into_a_terminal_of_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    config = replace(CONFIG, train=Train(steps=50_000))
    values = {
        "loss": 12.3456,
        "grad_norm": 1234.56,
        "learning_rate": 3e-4,
        "step_seconds": 0.9,
        "peak_memory_bytes": 7e10,
    }
    speed = {"tokens_per_second": 1.23e6, "tflops_per_device": 0.9}
    with Report(tmp_path, config, 0) as report:
        report.record(49_999, values | speed)
    assert all(len(Text.from_ansi(line)) <= 100 for line in capsys.readouterr().out.splitlines())


def test_text_is_never_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Report(tmp_path, CONFIG, 0) as report:
        report.say("runs/[/red]")
    assert capsys.readouterr().out == "runs/[/red]\n"


def test_the_time_left_counts_from_where_the_run_was_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = chain([100.0, 140.0], repeat(180.0))
    with Report(tmp_path, CONFIG, 10) as report:
        report.began = next(clock)
        monkeypatch.setattr("megalite.train.report.time.monotonic", lambda: next(clock))
        for step in (12, 14, 20):
            report.record(step, {"loss": 1.0})
    etas = [line.partition("ETA ")[2] for line in capsys.readouterr().out.splitlines() if line]
    assert etas == ["0:02:40", "0:02:00", ""]  # 20 s a step, for 8 and 6 steps; at the end, nothing


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_becomes_null(value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, CONFIG, {1: {"loss": value, "grad_norm": 1.0}})
    (line,) = lines(tmp_path)
    assert line["loss"] is None
    assert line["grad_norm"] == 1.0
    assert str(value) in capsys.readouterr().out


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, {5: RECORDS[5]})
    write(tmp_path, CONFIG, {10: RECORDS[10]}, first_step=5)
    assert [line["step"] for line in lines(tmp_path) if "event" not in line] == [5, 10]
    assert sorted(board(tmp_path)["loss"]) == [5, 10]


def loss(value: float) -> dict[str, float]:
    return {"loss": value}


def test_what_was_reported_after_the_step_a_run_is_resumed_from_no_longer_counts(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, {step: loss(step) for step in (1, 2, 3, 4)})
    write(tmp_path, CONFIG, {step: loss(10 * step) for step in (3, 5)}, first_step=2)
    counting = {record["step"]: record["loss"] for record in read_records(tmp_path / "metrics.jsonl")}
    assert counting == {1: 1, 2: 2, 3: 30, 5: 50}
    assert board(tmp_path)["loss"] == counting
    assert len(lines(tmp_path)) == 7, "nothing is deleted"


def test_a_run_that_begins_anew_takes_everything_back(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, {1: loss(1), 2: loss(2)})
    write(tmp_path, CONFIG, {1: loss(3)})
    assert [record["loss"] for record in read_records(tmp_path / "metrics.jsonl")] == [3]
    assert board(tmp_path)["loss"] == {1: 3}


def test_a_rollback_takes_back_what_came_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Report(tmp_path, CONFIG, 0) as report:
        for step in (1, 2, 3):
            report.record(step, loss(step))
        report.event(1, "rollback", "back to step 1", taken_back=3, left_out=((16, 24),), loss=math.nan)
        report.record(2, loss(20))
    assert "back to step 1" in capsys.readouterr().out
    assert {record["step"]: record["loss"] for record in read_records(tmp_path / "metrics.jsonl")} == {1: 1, 2: 20}
    assert board(tmp_path)["loss"] == {1: 1, 2: 20}
    (event,) = (line for line in read_lines(tmp_path / "metrics.jsonl") if "event" in line)
    del event["time"]
    assert event == {"step": 1, "event": "rollback", "taken_back": 3, "left_out": [[16, 24]], "loss": None}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_was_not_written_to_its_end_is_cut_off_and_shown(
    cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, CONFIG, {1: loss(1), 2: loss(2)})
    path = tmp_path / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text[:-cut])
    write(tmp_path, CONFIG, {3: loss(3)}, first_step=2)
    whole = cut == 1  # the newline alone is missing
    assert [record["step"] for record in read_records(path)] == ([1, 2, 3] if whole else [1, 3])
    assert path.read_text().startswith(text if whole else text.splitlines(keepends=True)[0])
    assert ("half-written" in capsys.readouterr().out) == (not whole)


def test_every_record_is_on_disk_at_once(tmp_path: Path) -> None:
    with Report(tmp_path, CONFIG, 0) as report:
        report.record(5, RECORDS[5])
        assert [line["step"] for line in lines(tmp_path)] == [5]


def test_a_full_disk_costs_what_is_reported_meanwhile_but_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, record: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Report(tmp_path, CONFIG, 0) as report:
        for step in (1, 2, 3):
            report.record(step, loss(step))
        with monkeypatch.context() as disk:
            disk.setattr("megalite.train.report.append", full)
            disk.setattr("megalite.train.tracking.board.append", full)
            report.event(1, "rollback", "back to step 1")
            report.record(2, loss(10))
            report.event(2, "spike", "a spike")
        report.record(3, loss(20))
    told = capsys.readouterr()
    assert "loss 10.0000" in told.out
    assert told.err.count("No space left on device; the run goes on without it") == 2  # metrics.jsonl and TensorBoard
    assert {record["step"]: record["loss"] for record in read_records(tmp_path / "metrics.jsonl")} == {1: 1, 3: 20}
    assert board(tmp_path)["loss"] == {1: 1, 3: 20}
    assert [line["event"] for line in read_lines(tmp_path / "metrics.jsonl") if "event" in line] == [
        "rollback",
        "spike",
    ]


def test_tensorboard_shows_events_as_text(tmp_path: Path) -> None:
    with Report(tmp_path, CONFIG, 0) as report:
        report.event(4, "spike", "a spike: é\udcff")  # as in the path of a file
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    ((tag, (event,)),) = ((tag, events.Tensors(tag)) for tag in events.Tags()["tensors"])
    assert (tag, event.step, event.tensor_proto.string_val) == ("spike/text_summary", 4, ["a spike: é\\udcff".encode()])


def test_tensorboard_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, replace(CONFIG, log=Log(tensorboard=False)), RECORDS)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_nothing_is_written_into_a_folder_that_another_job_has_taken(tmp_path: Path) -> None:
    owned = True

    def check_owner() -> None:
        if not owned:
            raise SystemExit(5)

    report = Report(tmp_path, CONFIG, 0, check_owner)
    report.record(1, {"loss": 1.0})
    owned = False
    with pytest.raises(SystemExit):
        report.record(2, {"loss": 2.0})
    assert [line["step"] for line in lines(tmp_path)] == [1]
