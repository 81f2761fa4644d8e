"""`events.jsonl`: what was decided about a run and what befell it, a line of JSON each.

Every line has `time` (seconds since the epoch), `event` (its kind), `by` (who wrote it), `text` (a sentence for people)
and details. The file is only ever appended to, by several writers: a line is one write.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from .files import PRIVATE_MODE, opened
from .line_files import Tail, number, parsed

Event = dict[str, Any]
MAX_TEXT_LENGTH = 16_000  # characters of a text: a line should be one write


def append_event(path: Path, event: str, by: str, text: str, **details: Any) -> Event:
    """Add an event to the file `path`. Returns it. Raises OSError if it cannot be written."""
    record: Event = {"time": time.time(), "event": event, "by": by, **details, "text": text[:MAX_TEXT_LENGTH]}
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_MODE)
    try:
        if _half_written(descriptor):
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
    return record


def read_events(path: Path) -> list[Event]:
    """Read all events in the order they were written, without lines that are none. No file: no events.

    Raises OSError if there is a file that cannot be read.
    """
    lines = Tail(path, must_open=True).lines()
    return [event for event in map(_parsed, lines) if event is not None]


def _half_written(descriptor: int) -> bool:
    """Return whether the last line has no end: its writer was killed, or the disk was full."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _parsed(line: bytes) -> Event | None:
    event = parsed(line)
    right = event is not None and isinstance(event.get("event"), str) and number(event.get("time")) is not None
    return event if right else None
