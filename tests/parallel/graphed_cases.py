"""Steps whose micro-batches are graphs beside those without, on one rank or on ranks of tensor parallelism."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from recorded_graphs import RecordedGraphs
from toy_jobs import CPU, config_of, make, parts

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Model
from megalite.config.schema import Batch, Config, Optim
from megalite.plan.parts import pieces
from megalite.train.build import Job, build_mesh
from megalite.train.step import train_step

ALONE = Layout()
MODEL = Model(2, 16, 4, 2, None, 24, 40, 16, qk_norm=True, qkv_bias=True)


def configured(model: Model = MODEL, adapter: Adapter | None = None, layout: Layout = ALONE, **train: Any) -> Config:
    """Four micro-batches a step, a rate that changes, and gradients that are clipped."""
    config = config_of(layout, model)
    train = {"precision": "bf16", "cuda_graph": True} | train
    return replace(
        config,
        adapter=adapter,
        batch=Batch(micro=2, global_=8),
        train=replace(config.train, **train),
        optim=Optim(lr=0.01, clip_norm=0.2),
    )


@contextmanager
def capturing() -> Iterator[list[RecordedGraphs]]:
    """Have jobs capture on a device of this CPU; what they capture, one job after another."""
    found: list[RecordedGraphs] = []

    def capture(_: torch.device) -> RecordedGraphs:
        found.append(RecordedGraphs())
        return found[-1]

    with patch("megalite.train.build.captures_on", capture):
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


def assert_steps_equal(config: Config, steps: int = 5) -> tuple[Job, Job]:
    """Assert that steps with graphs are those without to the last bit, while tokens, trained ones and the rate change.

    Returns both jobs.
    """
    graphed, plain = both(config)
    for step in range(steps):
        readings = [train_step(job, random_batch(job, step, masked=True), step).read() for job in (graphed, plain)]
        assert readings[0] == readings[1], step
    assert_equal(graphed, plain)
    return graphed, plain


def compared_over_ranks(config: Config, steps: int, least_piece: int) -> tuple[list[Counter[str]], int] | None:
    """Collectives of each graph of this rank, and how often graphs ran, once `assert_steps_equal` holds.

    least_piece: bytes from which it pays to gather and scatter in pieces. Layers are compiled for autograd alone. None:
    the rank is not in the layout.
    """
    if build_mesh(config, CPU) is None:
        return None
    for_autograd = partial(torch.compile, backend="aot_eager")
    with (
        capturing() as found,
        patch.object(pieces, "MIN_PIECE_BYTES", least_piece),
        patch.object(torch, "compile", for_autograd),
    ):
        assert_steps_equal(config, steps)
    (captured,) = found
    return [Counter(name for name in each if "c10d" in name) for each in captured.operations], captured.replays
