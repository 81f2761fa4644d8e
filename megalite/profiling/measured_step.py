"""The actions of a pipeline as they ran in a profiled step, beside the same actions on the simulator's clock."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from megalite.base.errors import InputError
from megalite.profiling.ranks import RankProfile
from megalite.schedule.actions import Kind, Table, Times
from megalite.schedule.draw import draw_svg
from megalite.schedule.simulate import COLUMN, LIVE_CHANGES, Cost, Span, Timeline, simulate

MILLISECOND = 1e6  # nanoseconds
MAX_DRAWN = 100_000  # actions of a picture


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


def measured_step(ranks: Sequence[RankProfile]) -> MeasuredStep | None:
    """The last profiled step of the first pipeline, all ranks of which are given; None if there is none.

    Raises InputError where its actions cannot have run as told.
    """
    for pipeline in _pipelines(ranks):
        lanes = [rank.actions for rank in pipeline]
        lasting = any(span.end > span.start for lane in lanes for span in lane)
        if lasting and all(lanes) and sum(map(len, lanes)) <= MAX_DRAWN:
            return _beside(pipeline, lanes)
    return None


def _pipelines(ranks: Sequence[RankProfile]) -> Iterator[list[RankProfile]]:
    """Whole pipelines among the ranks: all that differ in their place along pp alone, in its order."""
    found = defaultdict[tuple[tuple[str, int], ...], dict[int, RankProfile]](dict)
    for rank in ranks:
        others = dict(rank.about.coordinates)
        place = others.pop("pp")
        found[tuple(sorted(others.items()))][place] = rank
    for members in found.values():
        if len(members) == next(iter(members.values())).about.pp:
            yield [members[place] for place in sorted(members)]


def _placement(lanes: Sequence[Sequence[Span]]) -> tuple[int, ...]:
    """Ranks by stage. Raises InputError unless every stage has one, and every action ran once."""
    ran = [span.action for lane in lanes for span in lane]
    found = {(span.action.stage, rank) for rank, lane in enumerate(lanes) for span in lane}
    if len(set(ran)) < len(ran) or [stage for stage, _ in sorted(found)] != list(range(len(found))):
        raise InputError("each stage from 0 on must be on one rank, and each action must run once")
    return tuple(rank for _, rank in sorted(found))


def _beside(pipeline: Sequence[RankProfile], lanes: Sequence[Sequence[Span]]) -> MeasuredStep:
    orders = tuple(tuple(span.action for span in lane) for lane in lanes)
    table = Table("measured", 1 + max(action.micro for order in orders for action in order), _placement(lanes), orders)
    zero = min(span.start for lane in lanes for span in lane)
    own = tuple(
        tuple(Span(action, (start - zero) / MILLISECOND, (end - zero) / MILLISECOND) for action, start, end in lane)
        for lane in lanes
    )
    peaks = tuple(max(accumulate((LIVE_CHANGES.get(a.kind, 0) for a in order), initial=0)) for order in orders)
    measured = Timeline(table, 0.0, own, peaks)
    expected = pipeline[0].about.expected
    if expected is not None and pipeline[0].on_gpu and _last(expected.times, table):
        times = expected.times
        simulated = simulate(table, lambda a: 1e3 * times[a.stage][COLUMN[a.kind]], 1e3 * expected.transfer)
        source = f"times predicted for {expected.cluster}"
    else:
        simulated, source = simulate(table, _medians(own)), "the median times of these actions, and no waits"
    return MeasuredStep(pipeline[0].about.last, measured, simulated, source)


def _last(times: Times, table: Table) -> bool:
    """Flag: times are for all stages of a table, and any of its actions takes some."""
    return len(times) == table.stages and any(times[a.stage][COLUMN[a.kind]] for order in table.orders for a in order)


def _medians(lanes: Sequence[Sequence[Span]]) -> Cost:
    """The median time of actions of one kind on one stage."""
    found = defaultdict[tuple[Kind, int], list[float]](list)
    for span in (span for lane in lanes for span in lane):
        found[span.action.kind, span.action.stage].append(float(span.end - span.start))
    times: Mapping[tuple[Kind, int], float] = {key: median(lengths) for key, lengths in found.items()}
    return lambda action: times[action.kind, action.stage]
