"""When a run is saved with `checkpoint.interval: auto`: rank 0 decides from what was measured, and all do the same."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from toy_jobs import MODEL, config_of, make, one_rank, restorer, saver
from toy_runs import Notebook, Notes
from toy_runs import run as run_job

from megalite.checkpoint.store.manifest import complete, step_of
from megalite.checkpoint.store.progress import Progress
from megalite.config.layout import Layout
from megalite.config.schema import Checkpoint, Config
from megalite.train import cadence
from megalite.train.cadence import MIN_STEPS, WARM_UP_STEPS, Automatic, decide
from megalite.train.loop import Batches, train
from megalite.train.report import Silent
from megalite_launch.base.events import append_event
from megalite_launch.goodput.learned import failure_rate, learned_interval

FIRST = WARM_UP_STEPS + MIN_STEPS  # the step after which there is a first interval


def automatic(steps: int, layout: Layout, **checkpoint: object) -> Config:
    base = config_of(layout, replace(MODEL, layers=1))
    chosen = Checkpoint(**{"interval": "auto", "keep": 0, **checkpoint})  # type: ignore[arg-type]
    return replace(base, train=replace(base.train, steps=steps), checkpoint=chosen)


@given(st.floats(1e-4, 60), st.floats(0, 600), st.floats(1e-3, 100), st.integers(1, 16_384))
def test_an_interval_is_that_of_the_rule_in_whole_steps(save: float, write: float, step: float, ranks: int) -> None:
    found = decide(save, write, step, ranks, 2, 3.0)
    seconds = learned_interval(found.rate.mean, found.rate, 3.0, ranks, save, write)
    assert found.steps >= 1
    assert found.steps * step >= write
    assert abs(found.steps * step - seconds) <= step
    assert f"every {found.steps:,} step" in str(found)


def test_more_failures_shorten_the_interval() -> None:
    calm, first, failing = (decide(1.0, 0.0, 1.0, 64, failures, 64 * 24) for failures in (0, 1, 50))
    assert calm.rate.hours > 64 * 24
    assert first.steps < calm.steps
    assert failing.steps < calm.steps / 5


def test_a_run_without_a_supervisor_has_survived_its_own_time() -> None:
    """Nobody writes attempts down there; a ceiling of 100 times a save's cost for good would cost a hundredth."""
    with one_rank(), patch.object(cadence, "interruptions", lambda *_: (0, 0.0)):
        found = Automatic(make(automatic(100, Layout())), Silent())
        found._blocked.append(0.01)
        uptime = 1e7  # the clock counts from the machine's start
        found.begin(0, uptime)
        with patch.object(found, "_decide"):
            for step in range(1, 3601):
                found.stepped(step, uptime + step)
        decision = found._decision(Path("none"))
        assert decision.steps > 10
        assert decision.rate == failure_rate(0, 1.0)


def test_a_run_measures_before_it_saves_and_goes_on_from_that(tmp_path: Path) -> None:
    steps: list[int] = []

    def decided(save: float, write: float, step: float, ranks: int, failures: int, hours: float) -> cadence.Decision:
        steps.append(3 if not steps else 4)
        found = decide(save, write, step, ranks, failures, hours)
        assert (step > 0, save > 0, ranks, failures) == (True, True, 1, 1)
        assert hours == pytest.approx(2.0, abs=0.01)
        return replace(found, steps=steps[-1])

    run = tmp_path / "run"
    append_event(run / "events.jsonl", "attempt", "supervisor", "began", ranks=1)
    append_event(run / "events.jsonl", "attempt_ended", "supervisor", "ended", cause="crash")
    text = (run / "events.jsonl").read_text().splitlines()
    first = json.loads(text[0])
    (run / "events.jsonl").write_text(json.dumps(first | {"time": first["time"] - 7200}) + "\n" + text[1] + "\n")
    with one_rank(), patch.object(cadence, "decide", decided):
        notes, _, _ = run_job(automatic(19, Layout()), run)
    assert [step_of(path) for path in complete(run)] == [9, 13, 17, 19]
    assert len(steps) == 1 + 3  # after the first steps, and at every save but the last
    kept = json.loads((run / "interval.json").read_text())
    assert kept["steps"] == 4
    assert [(step, name) for step, name, _ in notes.noted if name == "saving"] == [
        (step, "saving") for step in (9, 13, 17, 19)
    ]
    assert all(0 < details["blocked"] < 60 for _, name, details in notes.noted if name == "saving")  # type: ignore[operator]
    (told,) = {details["steps"] for _, details in notes.named("interval")} - {3}
    assert told == 4

    with (
        one_rank(),
        patch.object(Automatic, "_decision", lambda *_: None),
    ):  # nothing measured anew: what was kept holds
        run_job(automatic(25, Layout()), run)
    assert [step_of(path) for path in complete(run)] == [9, 13, 17, 19, 23, 25]


def test_the_first_save_waits_for_no_interval(tmp_path: Path) -> None:
    """It measures what a save takes, and a failure before the interval is over finds a checkpoint."""
    with one_rank(), patch.object(cadence, "learned_interval", lambda *_: 1e6):
        run_job(automatic(12, Layout()), tmp_path)
        assert [step_of(path) for path in complete(tmp_path)] == [FIRST + 1, 12]
        run_job(automatic(24, Layout()), tmp_path)
    assert [step_of(path) for path in complete(tmp_path)] == [FIRST + 1, 12, 24]


def test_a_save_to_the_nodes_alone_is_told_and_moves_no_other() -> None:
    notes = Notes()
    with one_rank():
        found = Automatic(make(automatic(100, Layout())), notes)
        found.begin(0, 0.0)
        writer = SimpleNamespace(wrote=None)
        with patch.object(found, "_interval", 10), patch.object(found, "_decide", lambda step: None):
            for step, shared in ((4, False), (5, True)):
                with found.saving(step, writer, shared):  # type: ignore[arg-type]
                    pass
                assert found.due(14, False).save == (not shared)
    assert [(step, name) for step, name, _ in notes.noted] == [(4, "saving_local"), (5, "saving")]
    assert all(details["blocked"] >= 0 for _, _, details in notes.noted)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"steps": true}', '{"steps": 5, "save": NaN, "write": 1.0}', '{"steps": 0}', "[" * 4000]
)
def test_what_was_kept_and_is_damaged_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "interval.json").write_text(text)
    notes = Notes()
    notes.path = tmp_path / "metrics.jsonl"
    with one_rank():
        found = Automatic(make(automatic(6, Layout())), notes)
        assert not found.due(5, False).save
        assert found.due(6, False).save


def test_steps_that_are_kept_by_their_number_are_saved_too(tmp_path: Path) -> None:
    with one_rank():
        run_job(automatic(6, Layout(), keep_every=4), tmp_path)
    assert [step_of(path) for path in complete(tmp_path)] == [4, 6]


@pytest.mark.parametrize("interval", ["auto", 2])
def test_steps_that_are_listed_are_saved_and_kept(interval: int | Literal["auto"], tmp_path: Path) -> None:
    with one_rank():
        run_job(automatic(6, Layout(), interval=interval, at=[1, 3], keep=1), tmp_path)
    assert [step_of(path) for path in complete(tmp_path)] == [1, 3, 6]


def _steps_saved(folder: str, config: Config) -> list[int]:
    """On a rank of many, of which only the first one reports; the others run at other speeds."""
    rank = dist.get_rank()
    job = make(config)
    report = Notes() if rank == 0 else Silent()
    if isinstance(report, Notes):
        report.path = Path(folder) / "metrics.jsonl"
    reload = partial(restorer(job).newest, Path(folder) / "checkpoints", lambda _: None)
    saved: list[int] = []

    def jump(*_: object) -> float:
        return 0.02 * (2 + rank + len(saved))  # every rank would choose another interval

    with saver(job, Path(folder) / "checkpoints") as writer:
        save = writer.save

        def noted(progress: Progress, shared: bool) -> None:
            saved.append(progress.step)
            save(progress, shared)

        with patch.object(writer, "save", noted), patch.object(cadence, "learned_interval", jump):
            train(job, Batches(Notebook(job), None), Progress(), writer, reload, report)
    return saved


def test_all_ranks_save_the_same_steps(ranks: Ranks, tmp_path: Path) -> None:
    config = automatic(16, Layout(dp_shard=8))
    found = ranks.run(_steps_saved, str(tmp_path), config)
    assert found == [found[0]] * 8
    assert found[0][-1] == 16
    assert len(found[0]) > 1
    assert min(found[0]) > FIRST
    assert [step_of(path) for path in complete(tmp_path / "checkpoints")] == found[0]
