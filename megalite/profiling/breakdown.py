"""The time of a rank's profiled steps, in parts. Every moment counts once, so the parts add up to the steps.

A moment counts for compute if anything computes in it, else for communication, else for waiting: for data, or for the
host to begin the next piece of work. Communication is hidden where something computes meanwhile, and exposed elsewhere.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megalite.profiling.intervals import Interval, Intervals, common, contains, length, union, without
from megalite.profiling.kinds import AXES, COMMUNICATION, COMPUTE, OPERATORS, OTHER, axis_of, kind_of
from megalite.profiling.trace import GROUP, ON_GPU, READING, UPDATING, Event, Lane, Trace

DATA_WAIT, HOST_GAP = "data wait", "host gap"


@dataclass(frozen=True)
class Communication:
    """Nanoseconds in which ranks of an axis communicate. Where two axes are exposed at once, the first of AXES is."""

    total: int
    exposed: int

    @property
    def hidden(self) -> int:
        return self.total - self.exposed


@dataclass(frozen=True)
class Breakdown:
    """Nanoseconds of all profiled steps of a rank together.

    compute: by kind. axes: communication by axis. data_wait: the rest that passes while the rank reads a batch.
    host_gap: the other rest.
    """

    whole: int
    compute: Mapping[str, int]
    axes: Mapping[str, Communication]
    data_wait: int
    host_gap: int

    @property
    def parts(self) -> Mapping[str, int]:
        """Parts that add up to `whole`: kinds of compute, exposed communication by axis, and both waits."""
        exposed = {axis: found.exposed for axis, found in self.axes.items()}
        return {**self.compute, **exposed, DATA_WAIT: self.data_wait, HOST_GAP: self.host_gap}

    @property
    def computing(self) -> int:
        return sum(self.compute.values())


def breakdown(trace: Trace) -> Breakdown:
    """The parts of the time of a trace's profiled steps."""
    pieces, talks = _compute(trace), _communication(trace)
    rest = trace.window
    compute: dict[str, int] = {}
    for kind in COMPUTE:
        rest, compute[kind] = _taken(rest, union(pieces[kind]))
    axes = {}
    for axis in (*AXES, OTHER):
        if axis in talks:
            busy = union(talks[axis])
            rest, exposed = _taken(rest, busy)
            axes[axis] = Communication(length(common(trace.window, busy)), exposed)
    rest, waited = _taken(rest, trace.noted(READING))
    return Breakdown(length(trace.window), compute, axes, waited, length(rest))


def _taken(rest: Intervals, busy: Intervals) -> tuple[Intervals, int]:
    """The moments that are left of `rest`, and how long the others are."""
    left = without(rest, busy)
    return left, length(rest) - length(left)


def _compute(trace: Trace) -> Mapping[str, list[Interval]]:
    """Pieces of time by the kind of compute: those of kernels on a GPU, else of operators on threads that compute."""
    updating, found = trace.noted(UPDATING), defaultdict[str, list[Interval]](list)
    helpers = _communicating_threads(trace)
    for event in trace.events:
        if trace.on_gpu:
            counts = event.category in ON_GPU and COMMUNICATION.search(event.name) is None
        else:
            counts = (
                event.category == "cpu_op" and event.lane not in helpers and OPERATORS.match(event.name) is not None
            )
        if counts:
            updates = contains(updating, trace.begun(event))
            found["optimizer" if updates else kind_of(event.name)].append(event.interval)
    return found


def _communication(trace: Trace) -> Mapping[str, list[Interval]]:
    """Pieces of time in which each axis communicates."""
    found = defaultdict[str, list[Interval]](list)
    for event, group in _nccl_groups(trace) if trace.on_gpu else _gloo_groups(trace):
        found[trace.about.axes.get(group) or axis_of(trace.groups.get(group, ""))].append(event.interval)
    return found


def _nccl_groups(trace: Trace) -> Iterator[tuple[Event, str]]:
    """Kernels of NCCL with the names of their groups: their own, or that of the host's call they belong to."""
    calls = {
        event.call: event.group for event in trace.events if event.category == "cpu_op" and event.group is not None
    }
    for event in trace.events:
        if event.category == "kernel" and COMMUNICATION.search(event.name):
            yield event, str(calls.get(event.call, "") if event.group is None else event.group)


def _gloo_groups(trace: Trace) -> Iterator[tuple[Event, str]]:
    """Work of gloo with the names of its groups.

    Gloo does not tell the group, but a thread of gloo works for one group alone. It is the one that was mostly called
    last before the thread began some work. Messages are on the thread of the call, inside of it.
    """
    helpers, votes, called = _communicating_threads(trace), defaultdict[Lane, Counter[str]](Counter), ""
    work = list[tuple[Event, str]]()
    for event in trace.events:
        if event.category == "user_annotation" and event.name.startswith(GROUP):
            called = event.name.removeprefix(GROUP)
        elif event.name.startswith("gloo:"):
            work.append((event, called))
            votes[event.lane][called] += 1
    for event, group in work:
        yield event, votes[event.lane].most_common(1)[0][0] if event.lane in helpers else group


def _communicating_threads(trace: Trace) -> set[Lane]:
    """Threads of gloo: those that run its work, and of which no note is."""
    noting = {event.lane for event in trace.notes}
    return {event.lane for event in trace.events if event.name.startswith("gloo:")} - noting
