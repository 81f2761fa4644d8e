"""Rows of results.csv from what runs have written, and states from what Slurm says, without any process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expanding import Expander

from megalite.experiment.arrays import Queue
from megalite.experiment.cell import Cell
from megalite.experiment.folder import ExperimentFolder, Status
from megalite.experiment.results import row_of
from megalite.experiment.states import ended
from megalite.plan.model.size import flops_per_token
from megalite_launch.base.slurm import Answer


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": 1.0, **line}) + "\n" for line in lines))
    return folder


def record(step: int, loss: float, rate: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens_per_second": rate, "step_seconds": 32 / rate, **more}


def row(cell: Cell, run: Path, warm_up: int = 2) -> dict[str, Any]:
    return row_of(cell, Status(cell.id, f"x-{cell.id}", "sweep", cell.gpus, cell.steps), cell.steps, run, warm_up)


@pytest.fixture
def cell(expanded: Expander) -> Cell:
    """Of ten steps, on two ranks."""
    return expanded(launch={"gpus": 2}, set={"batch.micro": 2}).cells[0]


def test_a_resumed_run_has_the_row_of_one_that_was_not(cell: Cell, tmp_path: Path) -> None:
    whole = [record(step, 3 - 0.1 * step, 100.0 + step) for step in range(1, 11)]
    lost = [record(step, 9.0, 1.0) for step in range(5, 8)]  # made again after the resume
    resumed = [*whole[:4], *lost, {"step": 4, "event": "resumed"}, *whole[4:]]
    assert row(cell, written(tmp_path / "a", resumed)) == row(cell, written(tmp_path / "b", whole))
    found = row(cell, tmp_path / "b")
    assert found["loss_train"] == pytest.approx(2.0)  # of the last step: 1 % of ten is none
    assert found["tokens_per_second_per_gpu"] == pytest.approx(106.5 / 2)  # steps 3 to 10, of one of two ranks
    assert found["seconds"] == pytest.approx(sum(32 / (100 + step) for step in range(1, 11)))


def test_a_row_of_a_run_that_went_back_and_no_further_has_no_loss(cell: Cell, tmp_path: Path) -> None:
    lines = [record(step, 3.0, 100.0) for step in range(1, 11)]
    assert row(cell, written(tmp_path / "a", [*lines, {"step": 4, "event": "rollback"}]))["loss_train"] is None


def test_both_kinds_of_mfu_and_the_largest_memory(cell: Cell, tmp_path: Path) -> None:
    lines = [record(step, 3.0, 100.0, mfu=0.01 * step, peak_memory_bytes=7 * step) for step in range(1, 11)]
    lines[-1]["peak_memory_bytes"] = None
    found = row(cell, written(tmp_path / "a", lines))
    model = cell.config.model
    assert found["mfu_causal"] == pytest.approx(0.065)  # the median of steps 3 to 10
    full, causal = flops_per_token(model, "full"), flops_per_token(model, "causal")
    assert found["mfu_full"] == pytest.approx(0.065 * full / causal)
    assert found["mfu_full"] > found["mfu_causal"]
    assert found["peak_memory_bytes"] == 63


@pytest.mark.parametrize(
    ("cause", "said", "code", "becomes", "told"),
    [
        ("unhealthy", "step 3: the loss is nan", 4, "diverged", "step 3: the loss is nan"),
        ("unhealthy", "a checkpoint could not be written: No space", 4, "failed", "No space"),
        ("crash", "attempt 1 ended", 4, "failed", "its folder was removed or could not be written to"),
        ("crash", "torch.OutOfMemoryError: CUDA out of memory.", 1, "oom", "CUDA out of memory"),
        ("crash", "RuntimeError: a bug", 1, "failed", "a bug"),
    ],
)
def test_a_state_as_the_supervisor_tells_it(
    cause: str, said: str, code: int, becomes: str, told: str, tmp_path: Path
) -> None:
    event = {"event": "attempt_ended", "time": 1.0, "job": "7", "cause": cause, "text": said}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    found = ended(tmp_path, Status("0123456789", "a-0123456789", "sweep", 1, 10), code, timed_out=False)
    assert (found.state, found.code) == (becomes, code)
    assert told in found.reason


@pytest.mark.parametrize(
    ("state", "slurm", "becomes", "told"),
    [
        ("running", "TIMEOUT", "timeout", "job 7_3 is TIMEOUT"),
        ("running", "OUT_OF_MEMORY", "oom", "job 7_3 is OUT_OF_MEMORY"),
        ("running", "FAILED", "failed", "job 7_3 is FAILED"),
        ("running", "NODE_FAIL", "planned", "job 7_3 is NODE_FAIL, and the run is not done"),
        ("running", "RUNNING", "running", ""),
        ("running", "", "planned", "Slurm no longer knows job 7_3"),
        ("submitted", "PENDING", "submitted", ""),
        ("submitted", "TIMEOUT", "planned", "job 7_3 is TIMEOUT, before it came to this run"),
        ("submitted", "OUT_OF_MEMORY", "planned", "before it came to this run"),
        ("submitted", "CANCELLED", "planned", "job 7_3 is CANCELLED"),
        ("done", "TIMEOUT", "done", ""),
    ],
)
def test_a_state_as_slurm_tells_it(state: Any, slurm: str, becomes: str, told: str, tmp_path: Path) -> None:
    folder = ExperimentFolder(tmp_path)
    folder.launches.mkdir()
    (folder.launches / "001.json").write_text(json.dumps({"job": "7"}))
    status = Status("0123456789", "a-0123456789", "sweep", 1, 10, state=state, launch="001", place=3)
    other = "7_4 RUNNING\n"
    asked: list[str] = []

    def ask(words: Any, *_: Any) -> Answer:
        asked.append(words[0])
        return Answer(0, other + (f"7_3 {slurm}\n" if slurm else ""), "") if words[0] == "squeue" else Answer(1, "", "")

    found = Queue(folder, [status], ask).now(status)
    assert found.state == becomes
    assert told in found.reason
    assert bool(asked) == (state != "done")
    silent = Queue(folder, [status], lambda *_: Answer(1, "", "Slurm is away"))
    assert silent.now(status) == status
    unknown = replace(status, launch="002")  # its launcher was killed before it knew the job
    assert Queue(folder, [unknown], ask).now(unknown).state == ("planned" if state != "done" else "done")
