"""Steps whose micro-batches are graphs, on a device of a CPU that captures as CUDA does."""

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_graphs import RecordedGraphs
from torch.distributed.tensor import DTensor
from toy_jobs import advance, config_of, make, one_rank, parts, restorer, save

from megalite.base.errors import InputError
from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Model
from megalite.config.schema import Batch, Config, Optim, Rampup
from megalite.train.build import Job
from megalite.train.step import evaluate, train_step

MODEL = Model(2, 16, 4, 2, None, 24, 40, 16, qk_norm=True, qkv_bias=True)
EIGHTS = replace(MODEL, heads=2, kv_heads=2, ffn=32)  # its sizes fit products in 8 bits


def configured(model: Model = MODEL, adapter: Adapter | None = None, **train: Any) -> Config:
    """Four micro-batches a step, a rate that changes, and gradients that are clipped."""
    config = config_of(Layout(), model)
    train = {"precision": "bf16", "cuda_graph": True} | train
    return replace(
        config,
        adapter=adapter,
        batch=Batch(micro=2, global_=8),
        train=replace(config.train, **train),
        optim=Optim(lr=0.01, clip_norm=0.2),
    )


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGraphs]]:
    """What the jobs of a test capture, one after another."""
    found: list[RecordedGraphs] = []

    def capture(_: torch.device) -> RecordedGraphs:
        found.append(RecordedGraphs())
        return found[-1]

    monkeypatch.setattr("megalite.train.build.captures_on", capture)
    with one_rank():
        yield found


def both(config: Config) -> tuple[Job, Job]:
    """A job with graphs, and one without."""
    return make(config), make(replace(config, train=replace(config.train, cuda_graph=False)))


def assert_equal(job: Job, other: Job) -> None:
    """Weights, optimizer states and copies."""
    mine, theirs = parts(job), parts(other)
    assert mine.keys() == theirs.keys()
    assert all(part.values.equal(theirs[name].values) for name, part in mine.items())
    for ours, others in zip(job.copies, other.copies, strict=True):
        assert all(map(torch.equal, ours, others))


CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp64": {"precision": "fp64"},
    "fp8": {"precision": "fp8", "model": EIGHTS},
    "tied": {"model": replace(MODEL, tie_embeddings=True)},
    "adapter": {"adapter": Adapter(rank=2)},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
}


@pytest.mark.parametrize("name", CASES)
def test_steps_by_graphs_are_those_without_to_the_last_bit(name: str, graphs: list[RecordedGraphs]) -> None:
    """Tokens, the share of trained ones and the rate change from step to step."""
    graphed, plain = both(configured(**CASES[name]))
    for step in range(5):
        readings = [train_step(job, random_batch(job, step, masked=True), step).read() for job in (graphed, plain)]
        assert readings[0] == readings[1]
    assert_equal(graphed, plain)
    (captured,) = graphs
    assert len(captured.operations) == 2
    assert captured.replays == 4 * 4  # all micro-batches but those of the first step


def test_evaluations_and_loads_go_beside_graphs(graphs: list[RecordedGraphs], tmp_path: Path) -> None:
    """Evaluations of another micro-batch, too; copies are made anew of weights that were loaded."""
    jobs = both(configured())
    losses = []
    for job, folder in zip(jobs, (tmp_path / "graphed", tmp_path / "plain"), strict=True):
        made = advance(job, 0, 3)
        path = save(job, folder, 3)
        made += advance(job, 3, 5)
        made.append(evaluate(job, [random_batch(job, 9)]))
        restorer(job).all(path)
        losses.append(made + advance(job, 3, 6))
    assert losses[0] == losses[1]
    assert losses[0][3:5] == losses[0][6:8]
    assert_equal(*jobs)


def test_graphs_serve_steps_of_more_micro_batches(graphs: list[RecordedGraphs]) -> None:
    """Captured are those of the second step, and what adds to sums once there are such micro-batches."""
    config = configured()
    samples = 8 * config.model.sequence_length
    rampup = Rampup(start=2, increment=2, tokens=2 * samples)
    jobs = both(replace(config, batch=replace(config.batch, rampup=rampup)))
    counts = [random_batch(jobs[0], step).shape[0] for step in range(8)]
    assert counts[:3] == [1, 1, 1]
    assert counts[-1] == 4
    ours, theirs = (advance(job, 0, 8) for job in jobs)
    assert ours == theirs
    assert_equal(*jobs)
    (captured,) = graphs
    assert len(captured.operations) == 2
    assert captured.replays == sum(counts) - 2


def test_a_step_that_is_skipped_leaves_nothing_in_sums(graphs: list[RecordedGraphs]) -> None:
    jobs = both(configured())
    for job in jobs:
        advance(job, 0, 3)
        scale = next(iter(job.stages.values())).head.norm.weight
        assert isinstance(scale, DTensor)
        kept = scale.to_local().clone()
        with torch.no_grad():
            scale.to_local().fill_(torch.inf)
        assert not isfinite(train_step(job, random_batch(job, 3), 3).read().loss)
        with torch.no_grad():
            scale.to_local().copy_(kept)
    assert advance(jobs[0], 4, 6) == advance(jobs[1], 4, 6)
    assert_equal(*jobs)


def test_micro_batches_are_noted_whether_graphs_run_them_or_not(graphs: list[RecordedGraphs]) -> None:
    """A profile finds no action of a schedule, of which one would be there again and again."""
    job, _ = both(configured())
    expected = [f"micro-batch {number} of 4" for number in (1, 2, 3, 4)]
    for step in range(3):
        notes: list[str] = []
        job.activity.follower = lambda note, notes=notes: notes.append(str(note))
        train_step(job, random_batch(job, step), step)
        assert notes == [*expected, "finishing the gradients", "updating the weights"]


def test_graphs_take_a_gpu() -> None:
    with (
        one_rank(),
        pytest.raises(InputError, match=r"train\.cuda_graph = true: needs CUDA, and this job is on a CPU; use false"),
    ):
        make(configured())
