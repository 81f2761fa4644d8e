"""Outcomes of saves, as the training loop receives them. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete, and durable if there are no problems."""

    step: int
    path: Path
    bytes: int
    seconds: float  # from the end of staging
    problems: tuple[str, ...]  # warnings about flushing its name, its export and deleting others; each is told once


@dataclass(frozen=True)
class SavedLocally:
    """A checkpoint that is complete on the nodes, each of which has the parts of its own ranks."""

    step: int
    path: Path  # on the node of the first rank
    bytes: int  # bytes on all nodes, replicas not counted
    seconds: float  # from the end of staging
    replicas: int  # other nodes that have a part, too


@dataclass(frozen=True)
class Failed:
    """A checkpoint that could not be written; nothing is left of it."""

    step: int
    error: str
    poisoned: bool = False  # values to be saved are not finite: nobody could go on from them


@dataclass(frozen=True)
class FailedLocally:
    """A checkpoint that could not be written on all nodes; nothing is left of it, and training goes on."""

    step: int
    error: str


@dataclass(frozen=True)
class LocalOff:
    """Why there are no local checkpoints until the next start."""

    error: str


@dataclass(frozen=True)
class Served:
    """An export that the server of `checkpoint.export_url` has taken."""

    step: int
    path: Path
    seconds: float  # from the first try to its answer


@dataclass(frozen=True)
class NotServed:
    """An export that the server of `checkpoint.export_url` has not taken; training goes on."""

    step: int
    error: str


Outcome = Saved | SavedLocally | Failed | FailedLocally | LocalOff | Served | NotServed
