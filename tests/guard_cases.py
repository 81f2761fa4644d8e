"""What runs on the ranks in the tests of the guards: jobs in which something goes wrong."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from toy_jobs import Parts, make, parts, restorer
from toy_runs import Notes, RandomSamples, run

from megalite.base.errors import Unhealthy
from megalite.base.stop_signals import restore
from megalite.checkpoint.store.progress import Progress
from megalite.commands.verify import random_batch
from megalite.config.schema import Config
from megalite.data.loader import Micros
from megalite.train import loop, step
from megalite.train.build import Job
from megalite.train.guard import Requests
from megalite.train.loop import train_step
from megalite.train.step import gradients

NAN = "nan"
SPIKE = "spike"


@dataclass(frozen=True)
class Outcome:
    """What a run came to on one rank."""

    notes: Notes
    error: str  # of Unhealthy
    parts: Parts
    updates: set[float]  # that the optimizer has counted
    asked: list[list[int]]  # the samples of each batch read


@contextmanager
def troubled(trouble: str, sample: int, name: str = "", rank: int = 0) -> Iterator[None]:
    """Whenever a step takes `sample`, make the gradient of parameter `name` NaN on one rank, or the loss a spike."""

    def faulty(job: Job, batch: Micros) -> torch.Tensor:
        loss = gradients(job, batch)
        model = job.config.model
        tokens = torch.from_numpy(RandomSamples(model.sequence_length, model.vocab_size)[sample].tokens)
        here = (batch.tokens.flatten(0, -2) == tokens).all(1).any().float()
        dist.all_reduce(here, dist.ReduceOp.MAX, group=job.mesh.world)
        if here and trouble == SPIKE:
            return loss * 2
        if here and job.mesh.rank == rank:
            grad = dict(job.named_parameters())[name].grad
            grad.to_local().flatten()[0] = torch.nan  # type: ignore[union-attr]
        return loss

    with patch.object(step, "gradients", faulty):
        yield


@contextmanager
def signalled(number: int, at: int, rank: int) -> Iterator[None]:
    """One rank is sent a signal during step `at`."""

    def interrupted(job: Job, batch: Micros, index: int, asked: set[int]) -> object:
        signs = train_step(job, batch, index, asked)
        if index + 1 == at and job.mesh.rank == rank:
            os.kill(os.getpid(), number)
        return signs

    with patch.object(loop, "train_step", interrupted):
        yield


def troubled_run(
    config: Config,
    folder: Path,
    trouble: tuple[object, ...] | None = None,
    start: Progress | None = None,
    weights: Path | None = None,
) -> Outcome:
    """Train one rank of all, with `troubled(*trouble)`; from `start`, with the state of the checkpoint `weights`."""
    kept: list[Job] = []

    def prepare(job: Job) -> None:
        kept.append(job)
        if weights is not None:
            restorer(job).all(weights)

    error, notes, asked = "", Notes(), []
    with troubled(*trouble) if trouble else patch.object(step, "gradients", gradients):  # type: ignore[arg-type]
        try:
            notes, training, _ = run(config, folder, start, prepare)
            asked = [batch.ids for batch in training.asked]
        except Unhealthy as unhealthy:
            error = str(unhealthy)
    (job,) = kept
    return Outcome(notes, error, parts(job), counts(job), asked)


def stopped_run(config: Config, folder: Path, number: int, at: int, rank: int) -> tuple[int | None, list[str]]:
    """Train one rank of all; exit code, and what was reported."""
    requests = Requests()

    def prepare(job: Job) -> None:
        job.activity.asked = requests.received

    before = requests.listen()
    try:
        with signalled(number, at, rank):
            notes, _, _ = run(config, folder, prepare=prepare)
    finally:
        restore(before)
    return notes.code, notes.said


def counts(job: Job) -> set[float]:
    states = [job.optimizer.state[param] for _, param in job.named_parameters()]
    return {state["step"].item() for state in states if "step" in state}


def skipped(config: Config, steps: int, bad: int, poison: Callable[[Job], None] | None) -> tuple[Parts, set[float]]:
    """Take `steps` steps, of which `bad` has what `poison` leaves, or without it has no update."""
    job = make(config)
    for index in range(steps):
        loss = step.gradients(job, random_batch(job, index))
        if index == bad and poison is None:
            job.optimizer.zero_grad()
            continue
        if index == bad and poison is not None:
            poison(job)
        step.update(job, loss, index)
    return parts(job), counts(job)


def one_nan(job: Job) -> None:
    """NaN in one element of one gradient of the first rank."""
    _, param = next(iter(job.named_parameters()))
    if job.mesh.rank == 0:
        param.grad.to_local().flatten()[0] = torch.nan  # type: ignore[union-attr]


def one_infinity(job: Job) -> None:
    """Infinity in one element of one gradient of the last rank."""
    *_, (_, param) = job.named_parameters()
    if job.mesh.rank == job.mesh.layout.world_size - 1:
        param.grad.to_local().flatten()[0] = -torch.inf  # type: ignore[union-attr]
