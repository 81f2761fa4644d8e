"""The trace of one rank as `torch.profiler` writes it, read into events of the few categories that are looked at.

Traces are in the format of Chrome's viewer, times in microseconds. Events on a GPU name their stream, and the
`correlation` that they share with the host's call which launched them.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.profiling.expected import Expected
from megalite.profiling.intervals import Interval, Intervals, length, union, without
from megalite_launch.base.files import opened

NOTE = "note: "  # begins the names of events that say what the rank has noted, see `Activity`
GROUP = "group: "  # begins the names of events of calls to a process group, as gloo does not tell which one works
STEPS = NOTE + "profiled steps"  # event from the begin of the first profiled step to the end of the last
READING, UPDATING = "reading a batch", "updating the weights"  # the first and the last note of a step
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
MAX_BYTES = 1 << 30  # bytes of a trace as text
KEY = "megalite"  # key of the run's additions to a trace
NO_TRACE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # for other content


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time: on a thread of the host, or on a stream of the GPU. Times are nanoseconds."""

    category: str
    name: str
    lane: tuple[Any, Any]  # process or device, and thread or stream
    start: int
    end: int
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class Trace:
    """Events of a rank, in the order of their start.

    about: what the run added, such as its rank and steps. groups: descriptions of process groups, by their name.
    memory: the moment, the kind of device (0: host, 1: GPU) and the allocated bytes after each change.
    """

    about: Mapping[str, Any]
    events: tuple[Event, ...]
    groups: Mapping[str, str] = field(default_factory=dict)
    memory: tuple[tuple[int, int, int], ...] = ()

    @property
    def rank(self) -> int:
        return int(self.about["rank"])

    @property
    def steps(self) -> int:
        """The number of profiled steps."""
        return int(self.about["last"]) - int(self.about["first"]) + 1

    @cached_property
    def axes(self) -> Mapping[str, str]:
        """The axes of process groups, by the names of these."""
        return dict(self.about.get("axes", {}))

    @cached_property
    def on_gpu(self) -> bool:
        """Flag: the work of the steps is done by a GPU."""
        return any(event.category == "kernel" for event in self.events)

    @cached_property
    def notes(self) -> tuple[Event, ...]:
        """Events of the rank's notes, as `Activity` has them, without the beginning of the name."""
        return tuple(
            Event(event.category, event.name.removeprefix(NOTE), event.lane, event.start, event.end)
            for event in self.events
            if event.category == "user_annotation" and event.name.startswith(NOTE)
        )

    @cached_property
    def window(self) -> Intervals:
        """The moments of the profiled steps, each from its first note to the end of its last one.

        Between them are saves and evaluations.
        """
        whole = union(event.interval for event in self.events if event.name == STEPS)
        begins = [note.start for note in self.notes if note.name == READING]
        ends = [whole[0][0] if whole else 0, *(note.end for note in self.notes if note.name == UPDATING)]
        between = ((end, next((begin for begin in begins if begin >= end), end)) for end in ends)
        after = ((ends[-1], whole[-1][1]),) if len(ends) > 1 else ()
        return without(whole, union((*between, *after)))

    def noted(self, *notes: str) -> Intervals:
        """The moments in which the rank was at one of these."""
        return union(note.interval for note in self.notes if note.name in notes)

    @property
    def step_seconds(self) -> float:
        """Seconds of one profiled step."""
        return length(self.window) / 1e9 / self.steps

    @cached_property
    def launched(self) -> Mapping[Any, Event]:
        """The host's calls, by the correlation that they share with what they have launched."""
        calls = (event for event in self.events if event.category in LAUNCHES)
        return {event.details["correlation"]: event for event in calls if "correlation" in event.details}

    def begun(self, event: Event) -> int:
        """The moment at which the host began what the event is about: before the event, where that is on a GPU."""
        return self.launched.get(event.details.get("correlation"), event).start


def read_trace(path: Path) -> Trace:
    """The trace in a file that a run has written, compressed. Raises InputError."""
    try:
        with open(opened(path, 0), "rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InputError(f"{path}: is longer than {MAX_BYTES:,} bytes; profile fewer steps: profile.steps=1")
        # PyTorch 2.11 at times writes bytes into names that JSON and UTF-8 do not allow.
        return trace_of(json.loads(text.decode(errors="replace"), strict=False))
    except OSError as error:  # gzip's errors as well
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, *NO_TRACE) as error:
        told = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}: is not the trace of a run ({told:.100}); profile it again") from None


def trace_of(content: Mapping[str, Any]) -> Trace:
    """The trace in a file's content. For anything else, raises one of NO_TRACE."""
    groups = {
        str(group["pg_name"]): str(group["pg_desc"])
        for group in content.get("distributedInfo", {}).get("pg_config", ())
        if isinstance(group, dict)
    }
    about, raw = content[KEY], content["traceEvents"]
    _check(about)
    events = sorted(_events(raw), key=lambda event: (event.start, -event.end))
    return Trace(about, tuple(events), groups, tuple(sorted(_memory(raw))))


def _check(about: Mapping[str, Any]) -> None:
    """Raises one of NO_TRACE unless the run's additions to a trace are what others here read from them."""
    _, _, first, last = (int(about[key]) for key in ("rank", "pp", "first", "last"))
    if not 1 <= first <= last:
        raise ValueError(f"steps {first} to {last}")
    hash(tuple(dict(about["coordinates"]).items())), about["coordinates"]["pp"] + 0
    hash(tuple(dict(about.get("axes", {})).items()))
    Expected.read(about)


def _events(raw: list[dict[str, Any]]) -> Iterator[Event]:
    wanted = {"cpu_op", "user_annotation", *ON_GPU, *LAUNCHES}
    for each in raw:
        if each.get("ph") == "X" and each.get("cat") in wanted:
            start, took = _nanoseconds(each["ts"]), _nanoseconds(each.get("dur", 0))
            lane, details = (each.get("pid"), each.get("tid")), each.get("args", {})
            hash((lane, details.get("correlation"), details.get("External id")))  # others look these up
            yield Event(each["cat"], str(each["name"]), lane, start, start + took, details)


def _memory(raw: list[dict[str, Any]]) -> Iterator[tuple[int, int, int]]:
    for each in raw:
        if each.get("name") == "[memory]":
            told = each["args"]
            yield _nanoseconds(each["ts"]), int(told["Device Type"]), int(told["Total Allocated"])


def _nanoseconds(microseconds: float | str) -> int:
    return round(float(microseconds) * 1000)
