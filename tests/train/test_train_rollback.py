"""Rollbacks that fail again go further back; a run that only skips does not end well."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from toy_jobs import MODEL, config_of, make, one_rank, restorer
from toy_runs import Notes, run

from megalite.base.errors import Unhealthy
from megalite.checkpoint.store.manifest import complete, step_of
from megalite.checkpoint.store.retain import damaged
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.config.schema import Checkpoint, Config
from megalite.data.loader import Micros
from megalite.train import loop
from megalite.train.build import Job
from megalite.train.loop import train_step


def config(answer: str, steps: int = 8, **checkpoint: object) -> Config:
    base = config_of(Layout(), replace(MODEL, layers=1))
    train = replace(base.train, steps=steps, on_bad_step=answer, max_bad_steps=50)  # type: ignore[arg-type]
    schedule = replace(base.schedule, name="constant")
    saves = Checkpoint(**{"interval": 2, "keep": 0, **checkpoint})  # type: ignore[arg-type]
    return replace(base, train=train, schedule=schedule, checkpoint=saves)


@contextmanager
def failing(at: Callable[[int, int], bool]) -> Iterator[None]:
    """Whenever `at(step, bad steps so far)`, the loss of a step is NaN."""
    bad = 0

    def faulty(job: Job, batch: Micros, index: int, asked: set[int]) -> object:
        nonlocal bad
        signs = train_step(job, batch, index, asked)
        if at(index + 1, bad):
            bad += 1
            signs.arriving.host[1] = torch.nan
        return signs

    with patch.object(loop, "train_step", faulty):
        yield


def trained(settings: Config, folder: Path, at: Callable[[int, int], bool]) -> tuple[Notes, str]:
    """What a run has noted, and why it was ended."""
    notes = Notes()
    with one_rank(), failing(at), patch("toy_runs.Notes", lambda: notes):
        try:
            run(settings, folder)
        except Unhealthy as error:
            return notes, str(error)
    return notes, ""


def rollbacks(notes: Notes) -> list[tuple[object, int]]:
    """From which step to which."""
    return [(details["taken_back"], step) for step, details in notes.named("rollback")]


def test_a_rollback_that_fails_again_goes_one_checkpoint_further_back(tmp_path: Path) -> None:
    notes, error = trained(config("rollback"), tmp_path, lambda step, bad: step == 7 and bad < 3)
    assert error == ""
    assert rollbacks(notes) == [(7, 6), (7, 4), (7, 2)]
    aside = ["step-00000004.damaged", "step-00000006.damaged", "step-00000006.damaged.2"]
    assert [path.name for path in damaged(tmp_path)] == aside, "the last one was saved on the way from step 4"
    assert [step_of(path) for path in complete(tmp_path)] == [2, 4, 6, 8]
    told = "step-00000006: training that continued from it failed again; it is set aside as step-00000006.damaged"
    assert any(told in line for line in notes.said)


def test_a_rollback_takes_corrections_of_choices_back(tmp_path: Path) -> None:
    experts = Experts(4, 2, 8, correction_rate=0.003)
    here, seen = config("rollback", steps=4), list[tuple[int, torch.Tensor, torch.Tensor]]()

    def correction(job: Job) -> torch.Tensor:
        (found,) = job.stages[0].buffers()
        return found.to_local().clone()

    def faulty(job: Job, batch: Micros, index: int, asked: set[int]) -> object:
        before = correction(job)
        signs = train_step(job, batch, index, asked)
        seen.append((index, before, correction(job)))
        if len(seen) == 3:  # told only after the step is taken
            signs.arriving.host[1] = torch.nan
        return signs

    with one_rank(), patch.object(loop, "train_step", faulty):
        run(replace(here, model=replace(here.model, experts=experts)), tmp_path)
    assert [index for index, *_ in seen] == [0, 1, 2, 2, 3]
    _, before, after = seen[2]
    assert before.any()
    assert not before.equal(after)
    assert seen[3][1].equal(before)


def test_a_rollback_reads_states_into_files_again(tmp_path: Path) -> None:
    here = config("rollback")
    (scratch := tmp_path / "scratch").mkdir()
    there = replace(here, optim=replace(here.optim, placement=str(scratch)))
    curves = []
    for settings in (here, there):
        (folder := tmp_path / settings.optim.place).mkdir()
        notes, error = trained(settings, folder, lambda step, bad: step == 5 and bad == 0)
        assert (error, rollbacks(notes)) == ("", [(5, 4)])
        curves.append((notes.curve("loss"), notes.curve("parameter_norm")))
    assert curves[0] == curves[1]


def test_a_rollback_that_got_further_than_the_last_goes_to_the_newest(tmp_path: Path) -> None:
    notes, error = trained(config("rollback"), tmp_path, lambda step, bad: step == 5 + bad and bad < 3)
    assert error == ""
    assert rollbacks(notes) == [(5, 4), (6, 4), (7, 6)]
    assert damaged(tmp_path) == []


@pytest.mark.parametrize("answer", ["stop", "skip", "rollback"])
def test_weights_that_could_not_be_saved_are_named_as_the_cause_of_a_bad_step(answer: str, tmp_path: Path) -> None:
    notes = Notes()

    def poisoning(job: Job, batch: Micros, index: int, asked: set[int]) -> object:
        signs = train_step(job, batch, index, asked)
        if index == 3:
            _, param = next(job.named_parameters())
            param.data.fill_(torch.nan)
        return signs

    told = r"^step 4: NaN or infinity in model\.embed\.weight; it is not saved$"
    swapped = patch.object(loop, "train_step", poisoning), patch("toy_runs.Notes", lambda: notes)
    with one_rank(), swapped[0], swapped[1], pytest.raises(Unhealthy, match=told):
        run(config(answer), tmp_path)
    assert [step for step, _ in notes.named("bad_step")] == [5]
    ((_, failed),) = notes.named("save_failed")
    assert failed == {"checkpoint": 4, "error": "NaN or infinity in model.embed.weight"}
    assert [step_of(path) for path in complete(tmp_path)] == [2]


def test_the_oldest_checkpoint_stays_when_there_is_no_way_back(tmp_path: Path) -> None:
    notes, error = trained(config("rollback"), tmp_path, lambda step, _: step == 5)
    assert rollbacks(notes) == [(5, 4), (5, 2)]
    assert "going on from step 2 has failed again, and there is no checkpoint before it" in error
    assert [step_of(path) for path in complete(tmp_path)] == [2, 4], "what was saved again on the way"


def test_a_stop_during_a_rollback_keeps_what_was_left_out(tmp_path: Path) -> None:
    """The step after it is taken before the run ends, so that there is a checkpoint to say so."""
    settings, asked = config("rollback"), set[int]()

    def at(step: int, bad: int) -> bool:
        if step == 4:
            asked.add(signal.SIGTERM)
        return step == 5 and bad == 0

    def prepare(job: Job) -> None:
        job.activity.asked = asked

    with one_rank(), failing(at):
        notes, _, _ = run(settings, tmp_path, prepare=prepare)
        progress = restorer(make(settings)).all(tmp_path / "step-00000005")
    assert notes.code == 3
    assert notes.said[-1].startswith("stopped by SIGTERM after step 5, which is saved")
    ((step, details),) = notes.named("rollback")
    assert (step, progress.bad_steps, progress.left_out) == (4, 1, details["left_out"])
    assert progress.left_out


def test_weights_to_begin_with_are_no_checkpoint_to_roll_back_to(tmp_path: Path) -> None:
    _, error = trained(config("rollback", weights="runs/x"), tmp_path, lambda step, _: step == 1)
    assert "no checkpoint yet to roll back to (checkpoint.weights = runs/x is none of this run" in error


@pytest.mark.parametrize(
    ("steps", "bad", "ended"),
    [
        (3, (1, 2, 3), "the last 3 steps of the run were all bad"),
        (12, range(5, 13), "the last 8 steps of the run were all bad"),
        (12, range(6, 13), ""),
        (3, (1, 2), ""),
    ],
)
def test_a_run_that_only_skips_does_not_end_well(steps: int, bad: tuple[int, ...], ended: str, tmp_path: Path) -> None:
    _, error = trained(config("skip", steps), tmp_path, lambda step, _: step in bad)
    assert ended in error
    assert bool(error) == bool(ended)
    assert (steps in map(step_of, complete(tmp_path))) == (not ended)
