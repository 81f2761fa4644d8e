"""What the loop does when: reports, evaluations, checkpoints."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from toy_jobs import MODEL, config_of, make, one_rank

from megalite.checkpoint import store
from megalite.config.layout import Layout
from megalite.config.schema import Checkpoint, Config, Eval, Log
from megalite.train.loop import Batches, train
from megalite.verify import random_batch


class Batcher:
    """Stands in for a loader: batches that depend on the samples before them, and a list of what was asked for."""

    def __init__(self, job: object) -> None:
        self.job, self.asked = job, []

    def batches(self, consumed: int, steps: int) -> object:
        self.asked.append((consumed, steps))
        return (random_batch(self.job, consumed + 8 * index) for index in range(steps))


class Notes:
    """Stands in for the report."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.said: list[str] = []

    def record(self, step: int, values: dict[str, float]) -> None:
        self.records.append((step, values))

    def say(self, text: str) -> None:
        self.said.append(text)

    def stepped(self, step: int) -> None:
        pass

    def curve(self, name: str) -> dict[int, float]:
        return {step: values[name] for step, values in self.records if name in values}


def run(folder: Path, start: int = 0, lr: float = 0.01, **sections: object) -> tuple[Notes, Batcher, Batcher]:
    base = config_of(Layout(), replace(MODEL, layers=1))
    config: Config = replace(base, optim=replace(base.optim, lr=lr), **sections)  # type: ignore[arg-type]
    with one_rank():
        job, notes = make(config), Notes()
        training, validation = Batcher(job), Batcher(job)
        progress = store.Progress(start, 8 * start, asdict(config.model))
        train(job, Batches(training, validation), progress, folder, notes)  # type: ignore[arg-type]
    return notes, training, validation


def test_a_report_is_the_mean_of_all_steps_since_the_last(tmp_path: Path) -> None:
    each = run(tmp_path / "each")[0].curve("loss")
    others = {"eval": Eval(interval=2, steps=1), "checkpoint": Checkpoint(interval=3)}  # between reports, too
    some = run(tmp_path / "some", log=Log(interval=4), **others)[0].curve("loss")
    assert list(each) == [1, 2, 3, 4, 5, 6]
    means = {4: sum(each[step] for step in (1, 2, 3, 4)) / 4, 6: (each[5] + each[6]) / 2}
    assert some == pytest.approx(means, rel=1e-12)


def test_every_report_has_norm_rate_and_speed(tmp_path: Path) -> None:
    notes, _, _ = run(tmp_path)
    names = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "tflops_per_device"}
    assert all(values.keys() == names and min(values.values()) > 0 for _, values in notes.records)


@pytest.mark.parametrize(
    ("interval", "start", "evaluated"),
    [(0, 0, [0, 6]), (4, 0, [0, 4, 6]), (3, 0, [0, 3, 6]), (4, 3, [4, 6]), (4, 6, [])],
)
def test_evaluation_is_at_step_0_every_interval_and_the_end(
    interval: int, start: int, evaluated: list[int], tmp_path: Path
) -> None:
    notes, _, validation = run(tmp_path, start, eval=Eval(interval, steps=2))
    assert list(notes.curve("valid_loss")) == evaluated
    assert validation.asked == [(0, 2)] * len(evaluated)


def test_evaluation_sees_the_same_batches_every_time(tmp_path: Path) -> None:
    losses = run(tmp_path, lr=1e-300, eval=Eval(interval=2, steps=2))[0].curve("valid_loss")
    assert len(losses) == 4
    assert len(set(losses.values())) == 1


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    without = run(tmp_path / "without")[0].curve("loss")
    assert run(tmp_path / "with", eval=Eval(interval=1, steps=1))[0].curve("loss") == without


def test_no_evaluation_unless_asked_for(tmp_path: Path) -> None:
    notes, _, validation = run(tmp_path)
    assert notes.curve("valid_loss") == {}
    assert validation.asked == []


@pytest.mark.parametrize(
    ("interval", "keep", "left"), [(0, 2, [6]), (2, 0, [2, 4, 6]), (2, 2, [4, 6]), (4, 1, [6]), (4, 2, [4, 6])]
)
def test_checkpoints_are_saved_every_interval_and_at_the_end(
    interval: int, keep: int, left: list[int], tmp_path: Path
) -> None:
    notes, _, _ = run(tmp_path, checkpoint=Checkpoint(interval, keep))
    found = store.complete(tmp_path)
    assert [store.step_of(path) for path in found] == left
    assert [store.read_progress(path).samples for path in found] == [8 * step for step in left]
    assert f"saved {found[-1]}" in notes.said


def test_a_resumed_run_reads_on_where_it_stood(tmp_path: Path) -> None:
    _, training, _ = run(tmp_path, start=2)
    assert training.asked == [(16, 4)]


@pytest.mark.parametrize("start", [6, 9])
def test_a_finished_run_has_nothing_to_do(start: int, tmp_path: Path) -> None:
    notes, _, _ = run(tmp_path, start)
    assert notes.records == []
    assert store.complete(tmp_path) == []
