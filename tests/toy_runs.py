"""Whole training runs of toy jobs, on tokens made up on the spot."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from toy_jobs import make

from megalite.checkpoint import store
from megalite.config.schema import Config
from megalite.data.loader import Loader
from megalite.plan.batches import GlobalBatch
from megalite.train.build import Job
from megalite.train.loop import Batches, train
from megalite.train.worker import resume


class RandomSamples:
    """Stands in for token stores: sample i is random tokens that depend on i alone."""

    def __init__(self, sequence_length: int, vocab_size: int) -> None:
        self.sequence_length, self.vocab_size = sequence_length, vocab_size

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return np.random.default_rng(index).integers(self.vocab_size, size=self.sequence_length + 1)


class Notebook(Loader):
    """A loader that keeps a list of what was read."""

    def __init__(self, job: Job) -> None:
        model, mesh = job.config.model, job.mesh
        samples = RandomSamples(model.sequence_length, model.vocab_size)
        super().__init__(samples, job.config.batch.micro_size, mesh.layout.dp, mesh.dp_rank)  # type: ignore[arg-type]
        self.asked: list[GlobalBatch] = []

    def read(self, batch: GlobalBatch) -> object:  # type: ignore[override]
        self.asked.append(batch)
        return super().read(batch)


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


def run(config: Config, folder: Path, start: store.Progress | None = None) -> tuple[Notes, Notebook, Notebook]:
    """Train as one rank of all; from `start`, or from what is in `folder`."""
    job, notes = make(config), Notes()
    training, validation = Notebook(job), Notebook(job)
    train(job, Batches(training, validation), start or resume(job, folder), folder, notes)  # type: ignore[arg-type]
    return notes, training, validation


def curves(config: Config, folder: Path) -> dict[str, dict[int, float]]:
    """What a run reports."""
    notes, _, _ = run(config, folder)
    return {name: notes.curve(name) for name in ("loss", "grad_norm", "valid_loss")}
