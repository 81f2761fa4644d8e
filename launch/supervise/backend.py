"""Interface of the supervisor to where it runs: a Slurm job (`slurm_backend`) or this machine (`local_backend`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..base.events import Event
from ..base.run_folder import ATTEMPT
from ..base.slurm import SlurmJob

# Variables set by launchers around this one, which would give ranks a wrong place.
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
Pause = Callable[[float], None]


@dataclass(frozen=True)
class Start:
    """An attempt that is to be started."""

    name: str
    folder: Path  # where ranks say how they end
    logs: Path
    nodes: Sequence[str]
    number: int


class Running(Protocol):
    """Ranks under way."""

    def poll(self) -> int | None:
        """The exit code; None before the end."""

    def ask_to_stop(self, number: int) -> None:
        """Have the ranks save and end. number: the signal that the supervisor has heard."""

    def kill(self, pause: Pause) -> None:
        """End everything that belongs to the ranks, at once."""

    def said(self) -> list[str]:
        """Lines that the launcher of the ranks has printed."""


class Backend(Protocol):
    """The place where ranks run: a Slurm job or this machine."""

    job: str
    restart: int
    where: str  # slurm or local

    def rival(self, events: Sequence[Event]) -> str:
        """The job that is at work in this run folder already; empty if there is none."""

    def standing(self) -> SlurmJob | None:
        """The job as Slurm sees it; None if Slurm does not answer."""

    def nodes(self, job: SlurmJob | None) -> list[str]:
        """The nodes that the job has now."""

    def examine(self, nodes: Sequence[str], folder: Path, full: bool, stopped: Callable[[], bool]) -> dict[str, str]:
        """Nodes that are not fit, and why. stopped: whether to leave off."""

    def start(self, start: Start, command: Sequence[str]) -> Running:
        """Start the ranks. Raises OSError."""

    def requeue(self) -> str:
        """Put the job back into the queue. Returns why that was refused; empty if it was not."""

    def begin(self) -> None:
        """Start what watches over the supervisor itself. Called before every attempt."""

    def end(self) -> None:
        """The supervisor is about to end, and its silence is intended."""


def environment(start: Start, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks of an attempt."""
    kept = {name: value for name, value in os.environ.items() if name not in PLACES}
    return {**kept, **more, ATTEMPT: str(start.folder)}


def ask(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process, if it is there."""
    if process.poll() is None:
        process.send_signal(number)
