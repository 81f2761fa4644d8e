"""The trace of one rank: events of the few categories that are looked at, and what the run has added.

Events on a GPU name their stream, and the `correlation` that they share with the host's call which launched them.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megalite.profiling.about import About
from megalite.profiling.intervals import Interval, Intervals, length, union, without

NOTE = "note: "  # begins the names of events that say what the rank has noted, see `Activity`
GROUP = "group: "  # begins the names of events of calls to a process group, as gloo does not tell which one works
STEPS = NOTE + "profiled steps"  # event from the begin of the first profiled step to the end of the last
READING, UPDATING = "reading a batch", "updating the weights"  # the first and the last note of a step
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
Name = int | str | None  # name of a thread, a call or a group
Lane = tuple[Name, Name]  # process or device, and thread or stream


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time: on a thread of the host, or on a stream of the GPU. Times are nanoseconds."""

    category: str
    name: str
    lane: Lane
    start: int
    end: int
    correlation: Name = None
    call: Name = None  # call of the host to which it belongs
    group: Name = None  # group of processes

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class Trace:
    """Events of a rank, in the order of their start.

    groups: descriptions of process groups, by their name.
    memory: the moment, the kind of device (0: host, 1: GPU) and the allocated bytes after each change.
    """

    about: About
    events: tuple[Event, ...]
    groups: Mapping[str, str] = field(default_factory=dict)
    memory: tuple[tuple[int, int, int], ...] = ()

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
        between = ((end, begins[at] if (at := bisect_left(begins, end)) < len(begins) else end) for end in ends)
        after = ((ends[-1], whole[-1][1]),) if len(ends) > 1 else ()
        return without(whole, union((*between, *after)))

    def noted(self, *notes: str) -> Intervals:
        """The moments in which the rank was at one of these."""
        return union(note.interval for note in self.notes if note.name in notes)

    @property
    def step_seconds(self) -> float:
        """Seconds of one profiled step."""
        return length(self.window) / 1e9 / self.about.steps

    @cached_property
    def launched(self) -> Mapping[Name, Event]:
        """The host's calls, by the correlation that they share with what they have launched."""
        calls = (event for event in self.events if event.category in LAUNCHES)
        return {event.correlation: event for event in calls if event.correlation is not None}

    def begun(self, event: Event) -> int:
        """The moment at which the host began what the event is about: before the event, where that is on a GPU."""
        return self.launched.get(event.correlation, event).start
