"""Runs on the ranks of the test suite in which one rank alone is asked to stop, in a phase of the run."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from toy_jobs import Parts, parts
from toy_runs import Notes, run

from megalite.base.stop_signals import restore
from megalite.checkpoint.run.save import Saver
from megalite.config.schema import Config
from megalite.model.decoder import Decoder
from megalite.plan.resolved import Plan
from megalite.train.build import Job
from megalite.train.guard import Requests

PHASES: dict[str, tuple[type, str]] = {  # and what is called in them
    "forward": (Decoder, "forward"),
    "a schedule is made": (Plan, "table"),
    "evaluation": (Job, "evaluation"),
    "staging": (Saver, "save"),
    "writing": (Saver, "_write"),
}


@contextmanager
def signalled_in(phase: str, at: int, rank: int) -> Iterator[None]:
    """Send `rank` a signal in call `at` of what is called in a phase, counted from 0."""
    owner, name = PHASES[phase]
    work: Callable[..., Any] = getattr(owner, name)
    calls = count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == at and dist.get_rank() == rank:
            signal.raise_signal(signal.SIGUSR2)
        return work(*args, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, work)


def phase_run(config: Config, folder: Path, phase: str, at: int, rank: int) -> tuple[Notes, Parts]:
    """Train one rank of all until it is asked to stop, or to the end."""
    requests, jobs = Requests(), []

    def prepare(job: Job) -> None:
        job.activity.asked = requests.received
        jobs.append(job)

    before = requests.listen()
    try:
        with signalled_in(phase, at, rank):
            notes, _, _ = run(config, folder, prepare=prepare)
    finally:
        restore(before)
    return notes, parts(jobs[0])
