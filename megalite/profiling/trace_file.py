"""Reading the file of a trace, as `torch.profiler` writes it, in bounded memory.

Traces are in the format of Chrome's viewer, times in microseconds.
"""

import gzip
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from megalite.base.errors import InputError
from megalite.profiling.about import About
from megalite.profiling.stream import Stream
from megalite.profiling.trace import LAUNCHES, ON_GPU, STEPS, Event, Lane, Name, Trace
from megalite_launch.base.files import opened

CATEGORIES = {
    category: category for category in ("cpu_op", "user_annotation", *ON_GPU, *LAUNCHES)
}  # categories that are kept
KEY, EVENTS, PROCESSES = "megalite", "traceEvents", "distributedInfo"  # keys of a trace; the first is the run's own
MAX_EVENTS = 4_000_000  # events of a trace; in memory, each takes 300 bytes
MAX_NAME = 4096  # characters of a name that are kept
LIMIT = 1 << 63  # limit of nanoseconds and bytes
NO_TRACE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # errors for other content


def read_trace(path: Path) -> Trace:
    """The trace in a file that a run has written, compressed. Raises InputError."""
    kept = _Events()
    try:
        with open(opened(path, 0), "rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            return kept.trace(Stream(file).members((KEY, PROCESSES), EVENTS, kept.add))
    except OSError as error:  # gzip's errors as well
        raise InputError(f"{path}: cannot be read: {error.strerror or error}; profile it again") from None
    except (EOFError, zlib.error, *NO_TRACE) as error:
        raise InputError(f"{path}: is not the trace of a run: {_text(error):.300}; profile it again") from None


def trace_of(content: Mapping[str, Any]) -> Trace:
    """The trace in a file's content. For anything else, raises one of NO_TRACE."""
    kept = _Events()
    for event in content[EVENTS]:
        kept.add(event)
    return kept.trace(content)


class _Events:
    """Events of a file that are kept."""

    def __init__(self) -> None:
        self._number = 0  # number of the next event
        self._events: list[Event] = []
        self._memory: list[tuple[int, int, int]] = []
        self._lanes: dict[Lane, Lane] = {}

    def add(self, raw: Any) -> None:
        """Keep an event if it is of the kinds that are looked at. Raises ValueError."""
        try:
            event = _object(raw)
            if event.get("ph") == "X" and (category := CATEGORIES.get(event.get("cat"))):  # type: ignore[arg-type]
                self._events.append(self._event(category, event))
            elif event.get("name") == "[memory]":
                told = _object(event["args"])
                change = _nanoseconds(event, "ts"), _whole(told, "Device Type"), _whole(told, "Total Allocated")
                self._memory.append(change)
        except NO_TRACE as error:
            raise ValueError(f"{EVENTS}[{self._number}]: {_text(error)}") from None
        self._number += 1
        if self._number > MAX_EVENTS:
            raise ValueError(f"has more than {MAX_EVENTS:,} events; set profile.steps=1")

    def trace(self, content: Mapping[str, Any]) -> Trace:
        """The trace of all events, with the rest of their file. For anything else, raises one of NO_TRACE."""
        processes = _object(content.get(PROCESSES, {})).get("pg_config", [])
        described = [each for each in processes if isinstance(each, dict)]
        groups = {str(group["pg_name"]): str(group["pg_desc"]) for group in described}
        self._events.sort(key=lambda event: (event.start, -event.end))
        found = Trace(About.read(content[KEY]), tuple(self._events), groups, tuple(sorted(self._memory)))
        if not found.window:
            raise ValueError(f"no event that takes time has the name {STEPS!r}")
        return found

    def _event(self, category: str, raw: dict[str, Any]) -> Event:
        start, took, told = _nanoseconds(raw, "ts"), _nanoseconds(raw, "dur", 0), _object(raw.get("args", {}))
        if took < 0:
            raise ValueError(f"dur = {raw['dur']}: must not be negative")
        if not isinstance(name := raw["name"], str):
            raise TypeError("name: must be text")
        lane = _name(raw, "pid"), _name(raw, "tid")
        more = (_name(told, key) for key in ("correlation", "External id", "Process Group Name"))
        return Event(category, _kept(name), self._lanes.setdefault(lane, lane), start, start + took, *more)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{shortened(value)}: must be an object")
    return value


def _name(told: dict[str, Any], key: str) -> Name:
    found = told.get(key)
    if isinstance(found, str):
        return _kept(found)
    if found is None or type(found) is int:
        return found
    raise TypeError(f"{key} = {shortened(found)}: must be a whole number or text")


def _kept(text: str) -> str:
    """The beginning of a text, once in memory for all events that have it."""
    return sys.intern(text[:MAX_NAME])


def _nanoseconds(told: dict[str, Any], key: str, default: Any = None) -> int:
    found: Any = told.get(key, default)
    if type(found) in (int, float) and -LIMIT < found * 1000 < LIMIT:
        return round(found * 1000)
    raise ValueError(f"{key} = {shortened(found)}: must be microseconds, below {LIMIT / 1000:.1e}")


def _whole(told: dict[str, Any], key: str) -> int:
    if type(found := told.get(key)) is int and -LIMIT < found < LIMIT:
        return found
    raise ValueError(f"{key} = {shortened(found)}: must be a whole number below 2**63")


def _text(error: Exception) -> str:
    """Say why something is no trace."""
    if isinstance(error, RecursionError):
        return "is nested too deep"
    if isinstance(error, KeyError):
        return f"has no {error}"
    return str(error)
