"""The actions of a pipeline as they ran on a rank in a profiled step."""

import re
from bisect import bisect_left
from collections.abc import Iterable
from itertools import groupby

from megalite.profiling.kinds import COMMUNICATION
from megalite.profiling.trace import ON_GPU, READING, UPDATING, Event, Trace
from megalite.schedule.actions import Action, Kind
from megalite.schedule.simulate import Span

ACTION = re.compile(r"([FBIW])\(stage (\d{1,9}), micro-batch (\d{1,9})\) \(entry")  # beginning of an action's notes
WAITING = ", waiting for "  # in notes of waiting for an action's input


def actions(trace: Trace) -> list[Span]:
    """The spans of the last profiled step's compute actions, in nanoseconds; on a GPU, those of their kernels.

    Waits for its input are left out. Two that took turns come one after the other, each as long as its turns.
    """
    begun = [note.start for note in trace.notes if note.name == READING]
    if not begun:
        return []
    ended = next((note.start for note in trace.notes if note.name == UPDATING and note.start > begun[-1]), None)
    notes = [note for note in trace.notes if begun[-1] <= note.start and (ended is None or note.start < ended)]
    named = [(found, note) for note in notes if (found := ACTION.match(note.name))]
    kernels, stop, spans = _kernels(trace), 0, []
    for (kind, stage, micro), group in groupby(named, key=lambda pair: pair[0].groups()):
        members = [note for _, note in group]
        waits = [note.end for note in members if WAITING in note.name]
        start = (waits or [members[0].start])[-1]
        end = max(start, members[-1].end)
        if trace.on_gpu:  # a kernel belongs to one action
            first = bisect_left(kernels, members[0].start, stop, key=lambda pair: pair[0])
            stop = bisect_left(kernels, end, first, key=lambda pair: pair[0])
            if inside := [event for _, event in kernels[first:stop]]:
                start, end = inside[0].start, max(event.end for event in inside)
        spans.append(Span(Action(Kind(kind), int(stage), int(micro)), start, end))
    return _one_after_the_other(spans)


def _one_after_the_other(spans: Iterable[Span]) -> list[Span]:
    """The spans, where pieces of an F and of a B of another stage alternate as one of each."""
    found = list[Span]()
    for span in spans:
        turns = found[-2:]
        if span.action in [each.action for each in turns] and _take_turns(*turns):
            first, second = turns
            more = span.end - span.start
            if span.action == first.action:
                first, second = first._replace(end=first.end + more), second._replace(start=second.start + more)
            found[-2:] = first, second._replace(end=second.end + more)
        else:
            found.append(span)
    return found


def _take_turns(first: Span, second: Span | None = None) -> bool:
    """Return whether both can take turns."""
    return (
        second is not None
        and (first.action.kind, second.action.kind) == (Kind.F, Kind.B)
        and first.action.stage != second.action.stage
    )


def _kernels(trace: Trace) -> list[tuple[int, Event]]:
    """Compute on the GPU, with when the host launched it, in that order."""
    found = (event for event in trace.events if event.category in ON_GPU and not COMMUNICATION.search(event.name))
    return sorted(((trace.begun(event), event) for event in found), key=lambda pair: (pair[0], pair[1].start))
