"""Rows of results: one JSON file for each case, written whole or not at all. Imports no torch.

A row has the case's id, its hash and the commit that it was measured at, a status, and whatever is known. While a case
runs, what is known so far lies in ID.part.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import read_object, write_object
from megalite_tools.bench.training.guard import ProgramEnd

OK, FAILURE, OOM, TIMEOUT = "ok", "failed", "oom", "timeout"
CRASH, DISAGREEMENT, REFUSAL = "crash", "disagrees", "refused"
STATUSES = (OK, FAILURE, OOM, TIMEOUT, CRASH, DISAGREEMENT, REFUSAL)
PROGRAM_FAULTS = (CRASH, TIMEOUT)  # faults of a program, not of a size
MAX_ROW_BYTES = 1 << 24  # bytes of a row
MEMORY_ERRORS = ("out of memory", "OutOfMemoryError", "MemoryError", "Cannot allocate memory")

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """The rows in a work folder."""

    folder: Path

    def read(self, accepts: Callable[[Row], bool] = lambda _: True) -> dict[str, Row]:
        """All rows by id. A file without a row, with another row's name or with a row not accepted is left out."""
        found = {path.stem: readable(path) for path in sorted(self.folder.glob("*.json"))}
        return {name: row for name, row in found.items() if row and row.get("id") == name and accepts(row)}

    def write(self, case_id: str, row: Mapping[str, Any]) -> None:
        write_object(self._path(case_id), row)
        self._part(case_id).unlink(missing_ok=True)

    def note(self, case_id: str, row: Mapping[str, Any]) -> None:
        """Keep what is known of a case that runs."""
        write_object(self._part(case_id), row)

    def begin(self, case_id: str) -> None:
        """Take away what an earlier attempt has not ended. Its row stays until there is another."""
        self._part(case_id).unlink(missing_ok=True)

    def found(self, case_id: str) -> tuple[Row | None, Row | None]:
        """The row that a case has written at its end, and the one that it kept while it ran."""
        whole = readable(self._path(case_id))
        if whole is not None and "hash" in whole:  # left by an attempt before: the parent has added its hash
            whole = None
        return whole, readable(self._part(case_id))

    def _part(self, case_id: str) -> Path:
        return self.folder / f"{case_id}.part"

    def _path(self, case_id: str) -> Path:
        return self.folder / f"{case_id}.json"


def readable(path: Path) -> Row | None:
    """The object in a file, if it is a row; None for half a row, or none."""
    try:
        found = read_object(path, MAX_ROW_BYTES)
    except InputError:
        return None
    return found if found.get("status") in STATUSES else None


def finished(whole: Row | None, part: Row | None, ended: ProgramEnd) -> Row:
    """The row of a training step, by what it has written and how it ended.

    whole, part: what it has written at its end, and before. A part whose status is ok has all that a table needs, so it
    stays ok if what comes after, such as a profile, fails.
    """
    if whole is not None and (ended.code == 0 or whole["status"] != OK) and not ended.broken:
        return whole
    status, reason = ending(ended) if ended.code or ended.broken else (CRASH, "ended without a row")
    known = whole or part or {}
    if known.get("status") == OK:
        return {**known, "note": f"then: {reason}", "tail": ended.tail}
    at = f", while {known['stage']}" if known.get("stage") else ""
    return {**known, "status": status, "reason": reason + at, "tail": ended.tail}


def ending(ended: ProgramEnd) -> tuple[str, str]:
    """Status and reason of a program by how it ended."""
    if ended.broken == "time":
        return TIMEOUT, "took longer than its limit"
    if ended.broken == "memory":
        return OOM, "took more host memory than its limit"
    if ended.code == 0:
        return OK, ""
    if ended.code == -signal.SIGKILL:
        return OOM, "killed, as the system does when host memory runs out"
    if ended.code < 0:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        return CRASH, f"killed by {names.get(-ended.code, f'signal {-ended.code}')}"
    if any(sign in ended.tail for sign in MEMORY_ERRORS):
        return OOM, "out of memory"
    return CRASH, f"exit code {ended.code}"
