"""End of an attempt, as its ranks report it: exit codes that pass through srun or torchrun cannot be trusted.

In the folder of an attempt, a rank that fails writes `fail-RANK.json`, and rank 0 `outcome.json` when all have ended as
they should. Whoever reads them may find neither, if ranks were killed. As soon as all ranks have met, rank 0 leaves
`met`: an attempt that never came so far tells nothing of training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .files import read_bytes, write_whole
from .line_files import number, whole

DONE, FAILED, BAD_INPUT, STOPPED, UNHEALTHY, LOST_CONTACT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130  # docs/exit_codes.md
MAX_REPORT_BYTES = 2**20  # bytes of a report


@dataclass(frozen=True)
class Failure:
    """Report of a rank that ends before its time."""

    time: float  # seconds since the epoch
    rank: int
    node: str
    code: int  # its exit code
    step: int  # step that was under way; 0: none yet
    text: str  # why; empty if others know better

    @property
    def follows(self) -> bool:
        """Flag: this failure may only follow from the failure of another rank."""
        return self.code == LOST_CONTACT


@dataclass(frozen=True)
class Outcome:
    """Report of rank 0 when all ranks have ended as they should."""

    time: float
    code: int  # DONE or STOPPED
    step: int  # step that is saved


def write_failure(attempt: Path, failure: Failure) -> None:
    """Raises OSError.

    The first report of a rank stays. A later one with the same exit code may only give it another text: the rank has
    found out more about what it had noted before.
    """
    path = attempt / f"fail-{failure.rank:05d}.json"
    before = _read(path, Failure)
    if isinstance(before, Failure):
        if before.code != failure.code or failure.text in ("", before.text):
            return
        failure = replace(before, text=failure.text)
    write_whole(path, json.dumps(asdict(failure)))


def write_outcome(attempt: Path, code: int, step: int) -> None:
    """Raises OSError. The first outcome stays."""
    path = attempt / "outcome.json"
    if not path.exists():
        write_whole(path, json.dumps(asdict(Outcome(time.time(), code, step))))


def write_met(attempt: Path) -> None:
    """Raises OSError."""
    write_whole(attempt / "met", "")


def have_met(attempt: Path) -> bool:
    """Return whether all ranks have met, as far as can be seen."""
    return (attempt / "met").exists()


def read_failures(attempt: Path) -> list[Failure]:
    """Read all complete failures of an attempt: causes before failures that may follow from them, then by time."""
    found = [_read(path, Failure) for path in sorted(attempt.glob("fail-*.json"))]
    failures = [failure for failure in found if isinstance(failure, Failure)]
    return sorted(failures, key=lambda failure: (failure.follows, failure.time))


def read_outcome(attempt: Path) -> Outcome | None:
    found = _read(attempt / "outcome.json", Outcome)
    return found if isinstance(found, Outcome) else None


def _read(path: Path, kind: type[Failure] | type[Outcome]) -> Failure | Outcome | None:
    """Read the report of one kind from a file; None if the file is incomplete or of another kind."""
    try:
        report = json.loads(read_bytes(path, MAX_REPORT_BYTES))
        values = {field.name: report[field.name] for field in fields(kind)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    read: dict[str, Callable[[Any], Any]] = {"float": number, "int": whole, "str": _text}
    right = all(read[str(field.type)](values[field.name]) is not None for field in fields(kind))
    return kind(**values) if right else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
