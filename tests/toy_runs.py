"""Whole training runs of toy jobs, on tokens made up on the spot."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from toy_jobs import make, restorer, saver

from megalite.checkpoint.store.progress import Progress
from megalite.config.schema import Config
from megalite.data.documents import document_begins
from megalite.data.loader import Loader
from megalite.data.samples import Sample
from megalite.plan.batches import GlobalBatch
from megalite.train.build import Job
from megalite.train.load_metrics import LoadMeter
from megalite.train.loop import Batches, train
from megalite.train.report import Report


class RandomSamples:
    """Stands in for token stores: sample i is random tokens that depend on i alone."""

    def __init__(self, sequence_length: int, vocab_size: int) -> None:
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self.parts = ()

    def epochs(self, end: int) -> tuple[float, ...]:
        return ()

    def __getitem__(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(self.vocab_size, size=self.sequence_length + 1)
        return Sample(tokens, document_begins(tokens[:-1], None))

    def read(self, indices: Sequence[int]) -> list[Sample]:
        return [self[index] for index in indices]


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


class Notes(Report):
    """A report that keeps a list of everything."""

    def __init__(self) -> None:
        self.path = Path("metrics.jsonl")  # which is not written
        self.code: int | None = None  # that training ended with
        self.records: list[tuple[int, dict[str, float]]] = []
        self.said: list[str] = []
        self.events: list[tuple[int, str, dict[str, object]]] = []
        self.noted: list[tuple[int, str, dict[str, object]]] = []

    def record(self, step: int, values: dict[str, float]) -> None:
        self.records.append((step, values))

    def event(self, step: int, name: str, text: str, **details: object) -> None:
        self.events.append((step, name, details))
        self.said.append(text)

    def note(self, step: int, name: str, text: str, **details: object) -> None:
        self.noted.append((step, name, details))

    def load(self, step: int, meter: LoadMeter) -> None:
        self.noted.append((step, "expert_load", {"layers": meter.layers, "load": meter.latest.tolist()}))

    def say(self, text: str, style: str = "") -> None:
        self.said.append(text)

    def stepped(self, step: int) -> None:
        pass

    def named(self, name: str) -> list[tuple[int, dict[str, object]]]:
        """Every event of that name, with its step."""
        return [(step, details) for step, event, details in self.events if event == name]

    def curve(self, name: str) -> dict[int, float]:
        return {step: values[name] for step, values in self.records if name in values}


def run(
    config: Config, folder: Path, start: Progress | None = None, prepare: Callable[[Job], object] = lambda _: None
) -> tuple[Notes, Notebook, Notebook]:
    """Train as one rank of all; from `start`, or from what is in `folder`.

    prepare: is given the job first.
    """
    job, notes = make(config), Notes()
    notes.path = folder / "metrics.jsonl"
    prepare(job)
    training, validation = Notebook(job), Notebook(job)
    reload = partial(restorer(job).newest, folder, notes.say)
    progress = start or reload() or Progress()
    with saver(job, folder) as writer:
        notes.code = train(job, Batches(training, validation), progress, writer, reload, notes)
    return notes, training, validation


def curves(config: Config, folder: Path) -> dict[str, dict[int, float]]:
    """What a run reports."""
    notes, _, _ = run(config, folder)
    return {name: notes.curve(name) for name in ("loss", "grad_norm", "valid_loss", "parameter_norm")}
