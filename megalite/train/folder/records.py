"""`metrics.jsonl`: what a run reports, one JSON object per line. Reads it, and repairs its end after a run was killed.

A record has `step`, `time` and numbers. An event has `step`, `time`, `event` and details. When a run goes back to an
earlier step, because it is resumed or rolled back, an event says so. The file itself is append-only.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite_launch.base.files import opened

MAX_NUMBER = 1e100  # largest absolute value of a number: no run has a larger one, and pictures have no axis for it
MAX_LINE_BYTES = 1 << 20
WARM_UP_STEPS = 5  # steps of a start that tell no speed: kernels are compiled, connections made, memory is taken
RETURN_EVENTS = ("resumed", "rollback")  # events after which records of later steps no longer count


def line_of(step: int, values: Mapping[str, Any]) -> bytes:
    """The line of a record or an event of now. A number that is not finite becomes null: JSON has only finite ones."""
    known = {name: value if _finite(value) else None for name, value in values.items()}
    return (json.dumps({"step": step, "time": time.time(), **known}) + "\n").encode()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a run in the order they were written, as if it had never gone back; no events.

    A last line that is only half there is passed over. Raises InputError for a file that no run has written.
    """
    found: list[dict[str, Any]] = []
    for record in read_lines(path):
        if "event" not in record:
            found.append(record)
        elif record["event"] in RETURN_EVENTS:
            found = [earlier for earlier in found if earlier["step"] <= record["step"]]
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines. Raises InputError for one that is neither a record nor an event."""
    found: list[dict[str, Any]] = []
    try:
        with open(opened(path, os.O_RDONLY), "rb") as file:
            while raw := file.readline(MAX_LINE_BYTES):
                line = raw.decode()
                if not file.peek(1) and not _whole(line):
                    break
                found.append(_parsed(line, f"{path}: line {len(found) + 1}"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InputError(f"{path}: {reason}; give the folder of a run") from None
    return found


def restore_end(path: Path) -> str | None:
    """Make the file end in a whole line, so that it can be appended to. Returns what was cut off, if anything was."""
    if not path.exists():
        return None
    with open(opened(path, os.O_RDWR), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE_BYTES))
        text = file.read()
        last = text[text.rfind(b"\n") + 1 :]
        if not last:
            return None
        if len(last) == MAX_LINE_BYTES:
            raise InputError(f"{path}: ends in a line of more bytes than any record has; move the file away")
        if _whole(last.decode(errors="replace")):
            file.write(b"\n")
            return None
        file.truncate(size - len(last))
        return last.decode(errors="replace")


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _whole(line: str) -> bool:
    """Return whether a line was written to its end: it has its newline, or is a JSON object that only lacks it."""
    try:
        return line.endswith("\n") or isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not _is_number(record.get("step"), int) or not _has_numbers(record):
        raise InputError(f"{where} is not a record of a run: {line.rstrip()[:80]}")
    return record


def _has_numbers(record: dict[str, Any]) -> bool:
    """Return whether all values are numbers or null; of an event, whether its name is a text."""
    if "event" in record:
        return isinstance(record["event"], str)
    return all(value is None or _is_number(value, (int, float)) for value in record.values())


def _is_number(value: Any, of: type[int] | tuple[type[int], type[float]]) -> bool:
    return isinstance(value, of) and not abs(value) > MAX_NUMBER  # NaN is one
