"""The actions of a pipeline as they ran in a profiled step, beside the same actions on the simulator's clock."""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median

from megalite.profiling.expected import Expected
from megalite.profiling.kinds import COMMUNICATION
from megalite.profiling.trace import ON_GPU, READING, UPDATING, Event, Trace
from megalite.schedule.actions import Action, Kind, Table
from megalite.schedule.draw import draw_svg
from megalite.schedule.simulate import COLUMN, LIVE_CHANGES, Cost, Span, Timeline, simulate

ACTION = re.compile(r"([FBIW])\(stage (\d{1,9}), micro-batch (\d{1,9})\) \(entry")  # beginning of an action's notes
WAITING = ", waiting for "  # in notes of waiting for an action's input
MILLISECOND = 1e6  # nanoseconds


@dataclass(frozen=True)
class MeasuredStep:
    """The last profiled step of one pipeline. Times are milliseconds from its first action.

    measured: as it ran. simulated: the same order of actions if each begins as soon as it can. source: whose times of
    actions the simulation has.
    """

    number: int
    measured: Timeline
    simulated: Timeline
    source: str

    def svg(self) -> str:
        """A picture with two lanes per rank."""
        times = [
            f"{name} {float(line.makespan):.4g} ms"
            for name, line in (("", self.measured), ("simulated", self.simulated))
        ]
        heading = f"step {self.number}, the last profiled:{times[0]} measured, {times[1]} with {self.source}"
        return draw_svg(self.measured.table, self.measured, heading, {"simulated": self.simulated})


def measured_step(traces: Sequence[Trace]) -> MeasuredStep | None:
    """The last profiled step of the first pipeline, all ranks of which are among the traces; None if there is none."""
    for pipeline in _pipelines(traces):
        lanes = [actions(trace) for trace in pipeline]
        placement = {span.action.stage: rank for rank, lane in enumerate(lanes) for span in lane}
        lasting = any(span.end > span.start for lane in lanes for span in lane)
        if lasting and all(lanes) and sorted(placement) == list(range(len(placement))):
            return _beside(pipeline, lanes, tuple(placement[stage] for stage in range(len(placement))))
    return None


def actions(trace: Trace) -> list[Span]:
    """The spans of the last profiled step's compute actions, in nanoseconds; on a GPU, those of their kernels.

    Waits for its input are left out.
    """
    begun = [note.start for note in trace.notes if note.name == READING]
    if not begun:
        return []
    ended = next((note.start for note in trace.notes if note.name == UPDATING and note.start > begun[-1]), None)
    notes = [note for note in trace.notes if begun[-1] <= note.start and (ended is None or note.start < ended)]
    named = [(found, note) for note in notes if (found := ACTION.match(note.name))]
    kernels = _kernels(trace)
    spans = []
    for (kind, stage, micro), group in groupby(named, key=lambda pair: pair[0].groups()):
        members = [note for _, note in group]
        waits = [note.end for note in members if WAITING in note.name]
        start, end = (waits or [members[0].start])[-1], members[-1].end
        if trace.on_gpu:
            first = bisect_left(kernels, members[0].start, key=lambda pair: pair[0])
            inside = [event for _, event in kernels[first : bisect_left(kernels, end, key=lambda pair: pair[0])]]
            if inside:
                start, end = inside[0].start, max(event.end for event in inside)
        spans.append(Span(Action(Kind(kind), int(stage), int(micro)), start, end))
    return spans


def _kernels(trace: Trace) -> list[tuple[int, Event]]:
    """Compute on the GPU, with when the host launched it, in that order."""
    found = (event for event in trace.events if event.category in ON_GPU and not COMMUNICATION.search(event.name))
    return sorted(((trace.begun(event), event) for event in found), key=lambda pair: (pair[0], pair[1].start))


def _pipelines(traces: Sequence[Trace]) -> Iterator[list[Trace]]:
    """Whole pipelines among the traces: all ranks that differ in their place along pp alone, in its order."""
    found = defaultdict[tuple[tuple[str, int], ...], dict[int, Trace]](dict)
    for trace in traces:
        others = dict(trace.about["coordinates"])
        place = others.pop("pp")
        found[tuple(sorted(others.items()))][place] = trace
    for members in found.values():
        if len(members) == next(iter(members.values())).about["pp"]:
            yield [members[place] for place in sorted(members)]


def _beside(pipeline: Sequence[Trace], lanes: Sequence[list[Span]], placement: tuple[int, ...]) -> MeasuredStep:
    orders = tuple(tuple(span.action for span in lane) for lane in lanes)
    table = Table("measured", 1 + max(action.micro for order in orders for action in order), placement, orders)
    zero = min(span.start for lane in lanes for span in lane)
    own = tuple(
        tuple(Span(action, (start - zero) / MILLISECOND, (end - zero) / MILLISECOND) for action, start, end in lane)
        for lane in lanes
    )
    peaks = tuple(max(accumulate((LIVE_CHANGES.get(a.kind, 0) for a in order), initial=0)) for order in orders)
    measured = Timeline(table, 0.0, own, peaks)
    expected = Expected.read(pipeline[0].about)
    if expected is not None and pipeline[0].on_gpu and len(expected.times) == table.stages:
        times = expected.times
        simulated = simulate(table, lambda a: 1e3 * times[a.stage][COLUMN[a.kind]], 1e3 * expected.transfer)
        source = f"times predicted for {expected.cluster}"
    else:
        simulated, source = simulate(table, _medians(own)), "the median times of these actions, and no waits"
    return MeasuredStep(int(pipeline[0].about["last"]), measured, simulated, source)


def _medians(lanes: Sequence[Sequence[Span]]) -> Cost:
    """The median time of actions of one kind on one stage."""
    found = defaultdict[tuple[Kind, int], list[float]](list)
    for span in (span for lane in lanes for span in lane):
        found[span.action.kind, span.action.stage].append(float(span.end - span.start))
    times: Mapping[tuple[Kind, int], float] = {key: median(lengths) for key, lengths in found.items()}
    return lambda action: times[action.kind, action.stage]
