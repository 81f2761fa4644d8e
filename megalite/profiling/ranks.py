"""The profiled steps of the ranks of a run. Traces may be long, so one at a time is in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.base.errors import InputError
from megalite.profiling.about import About
from megalite.profiling.actions import actions
from megalite.profiling.breakdown import Breakdown, breakdown
from megalite.profiling.folder import TRACE, step_of, traces_in
from megalite.profiling.memory import Curve, memory_curve
from megalite.profiling.trace import Trace
from megalite.profiling.trace_file import read_trace
from megalite.schedule.simulate import Span


@dataclass(frozen=True)
class RankProfile:
    """Summary of a rank's trace: its parts, the actions of its last step, and its memory over the steps."""

    about: About
    on_gpu: bool
    parts: Breakdown
    actions: Sequence[Span]
    memory: Curve

    @staticmethod
    def of(trace: Trace) -> "RankProfile":
        return RankProfile(trace.about, trace.on_gpu, breakdown(trace), actions(trace), memory_curve(trace))


def read_ranks(folder: Path) -> list[RankProfile]:
    """All ranks with a trace in a folder of profiled steps.

    Raises InputError where traces cannot be read, or are not of the folder's steps and of ranks of one job.
    """
    found: list[RankProfile] = []
    places = dict[frozenset[tuple[str, int]], int]()
    for rank, path in traces_in(folder).items():
        each = RankProfile.of(read_trace(path))
        about, first = each.about, (found or [each])[0].about
        if (about.rank, about.first) != (rank, step_of(folder)):
            told = f"is of rank {about.rank} and of steps from {about.first} on, not of those that its path says"
            raise InputError(f"{path}: {told}; remove it")
        other = places.setdefault(frozenset(about.coordinates.items()), rank)
        if other != rank or (about.last, about.pp) != (first.last, first.pp):
            told = f"is of another job than {TRACE.format(rank=min(other, first.rank))}"
            raise InputError(f"{path}: {told}: last step, pp and coordinates do not fit; remove one of them")
        found.append(each)
    return found
