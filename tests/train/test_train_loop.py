"""What the loop does when: reports, evaluations, checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import toy_runs
from ranks import Ranks
from toy_jobs import MODEL, config_of, make, one_rank
from toy_runs import Notebook, Notes, curves
from toy_runs import run as run_job

from megalite.base.errors import Unhealthy
from megalite.checkpoint.store.manifest import complete, step_of
from megalite.checkpoint.store.progress import Progress
from megalite.config.layout import Layout
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Checkpoint, Config, Curriculum, Eval, LearningRate, Log, Rampup
from megalite.plan.batches import GlobalBatch
from megalite.plan.model.size import flops_per_token
from megalite.train.guard import Judged
from megalite.train.loop import Meter
from megalite.train.vital_signs import Reading

GROWING = Batch(2, 24, rampup=Rampup(8, None, 300), curriculum=Curriculum(2, 500))
GROWN = [(8, 4), (8, 4), (8, 4), (16, 2), (24, 2), (24, 1)]  # samples and pieces of the first steps


def run(folder: Path, start: int = 0, lr: float = 0.01, **sections: object) -> tuple[Notes, Notebook, Notebook]:
    base = config_of(Layout(), replace(MODEL, layers=1))
    config: Config = replace(base, optim=replace(base.optim, lr=lr), **sections)  # type: ignore[arg-type]
    with one_rank():
        return run_job(config, folder, Progress(start, start, 8 * start, 64 * start))


def test_a_report_is_the_mean_of_all_steps_since_the_last(tmp_path: Path) -> None:
    each = run(tmp_path / "each")[0].curve("loss")
    others = {"eval": Eval(interval=2, steps=1), "checkpoint": Checkpoint(interval=3)}  # between reports, too
    some = run(tmp_path / "some", log=Log(interval=4), **others)[0].curve("loss")
    assert list(each) == [1, 2, 3, 4, 5, 6]
    means = {4: sum(each[step] for step in (1, 2, 3, 4)) / 4, 6: (each[5] + each[6]) / 2}
    assert some == pytest.approx(means, rel=1e-12)


def test_every_report_has_norm_rate_and_speed(tmp_path: Path) -> None:
    notes, _, _ = run(tmp_path)
    names = {"loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "tflops_per_device"}
    names |= {"parameter_norm", "step_seconds", "data_wait_seconds", "peak_memory_bytes"}
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
    assert validation.asked == [GlobalBatch(0, 8), GlobalBatch(8, 8)] * len(evaluated)


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
    found = complete(tmp_path)
    assert [step_of(path) for path in found] == left
    told = {details["checkpoint"]: details["path"] for _, details in notes.named("saved")}
    assert told.items() >= {step_of(path): str(path) for path in found}.items()


def test_a_checkpoint_that_cannot_be_written_is_reported_and_no_run_ends_well_without_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    monkeypatch.setattr(toy_runs, "Notes", lambda: notes)

    def full(path: Path) -> Path:
        raise OSError(f"{path}: no room")

    monkeypatch.setattr("megalite.checkpoint.publish.new_partial", full)
    with pytest.raises(Unhealthy, match="the last checkpoint could not be written"):
        run(tmp_path)
    ((step, details),) = notes.named("save_failed")
    assert (step, details["checkpoint"]) == (6, 6)
    assert "step-00000006: no room" in str(details["error"])
    assert len(notes.curve("loss")) == 6


def test_a_resumed_run_reads_on_where_it_stood(tmp_path: Path) -> None:
    _, training, _ = run(tmp_path, start=2)
    assert training.asked == [GlobalBatch(16 + 8 * step, 8) for step in range(4)]


@pytest.mark.parametrize("start", [6, 9])
def test_a_finished_run_has_nothing_to_do(start: int, tmp_path: Path) -> None:
    notes, _, _ = run(tmp_path, start)
    assert notes.records == []
    assert complete(tmp_path) == []


def test_batches_and_sequences_grow(tmp_path: Path) -> None:
    notes, training, validation = run(tmp_path, batch=GROWING, eval=Eval(interval=3, steps=1))
    assert [(batch.samples, batch.pieces) for batch in training.asked] == GROWN
    samples = [sum(size for size, _ in GROWN[:step]) for step in range(1, 7)]
    assert [batch.end for batch in training.asked] == samples
    assert notes.curve("tokens") == {step: 8 * count for step, count in enumerate(samples, 1)}
    assert validation.asked == [GlobalBatch(0, 24)] * 3


def test_a_step_of_a_ramp_is_that_of_a_run_with_its_batch(tmp_path: Path) -> None:
    ramp = run(tmp_path / "ramp", batch=replace(GROWING, curriculum=None))[0]
    plain = run(tmp_path / "plain", batch=Batch(2, 8))[0]
    for name in ("loss", "grad_norm"):
        grown, expected = ramp.curve(name), plain.curve(name)
        assert [grown[step] for step in (1, 2, 3)] == [expected[step] for step in (1, 2, 3)]


def test_every_token_counts_alike_in_the_mean_of_unequal_steps(tmp_path: Path) -> None:
    each = run(tmp_path / "each", batch=GROWING)[0].curve("loss")
    some = run(tmp_path / "some", batch=GROWING, log=Log(interval=4))[0].curve("loss")

    def mean(steps: range) -> float:
        return sum(each[step] * GROWN[step - 1][0] for step in steps) / sum(GROWN[step - 1][0] for step in steps)

    assert some == pytest.approx({4: mean(range(1, 5)), 6: mean(range(5, 7))}, rel=1e-12)


def test_the_meter_counts_all_ranks_tokens_and_shorter_sequences_flops() -> None:
    model = replace(MODEL, layers=1)
    with one_rank():
        meter = Meter(make(config_of(Layout(), model)))
        for batch in (GlobalBatch(0, 8), GlobalBatch(8, 12, pieces=2)):
            meter.add(Judged(1, batch, Reading(1.0, 1.0, ()), "good", ""))
    assert meter.tokens == 160
    short = replace(model, sequence_length=4)
    assert meter.flops == 64 * flops_per_token(model) + 96 * flops_per_token(short)


def test_growing_batches_train_alike_in_every_layout_and_after_a_resumption(tmp_path: Path, ranks: Ranks) -> None:
    def config(layout: Layout, micro: int, steps: int) -> Config:
        base = config_of(layout)
        batch, train = replace(GROWING, micro=micro), replace(base.train, steps=steps)
        made = replace(
            base, batch=batch, train=train, schedule=LearningRate("constant"), eval=Eval(interval=3, steps=1)
        )
        assert validate(made, layout.world_size) == []
        return made

    with one_rank():
        expected = curves(config(Layout(), 8, 6), tmp_path / "one")
    before, after = Layout(pp=2, dp_shard=2, tp=2), Layout(pp=4, dp_replicate=2)
    first = ranks.run(curves, config(before, 2, 3), tmp_path / "many")
    then = ranks.run(curves, config(after, 4, 6), tmp_path / "many")
    for name, curve in expected.items():
        for found in first:
            assert found[name] == pytest.approx({step: value for step, value in curve.items() if step <= 3}, rel=1e-12)
        for found in then:
            assert found[name] == pytest.approx({step: value for step, value in curve.items() if step > 3}, rel=1e-12)
