"""Memory over the profiled steps, from the allocations in a trace."""

from collections.abc import Mapping, Sequence

from megalite.profiling.trace import Trace
from megalite_launch.page.lines import Axis, Line, line_chart

GPU = 1  # kind of device in a trace's memory
MAX_POINTS = 400  # points of a line in the picture: more are not to be told apart
GIB = float(1 << 30)
MIB = float(1 << 20)
Curve = Sequence[tuple[float, float]]  # moments and bytes


def memory_curve(trace: Trace) -> Curve:
    """Milliseconds from the begin of the profiled steps, and allocated bytes: the highest of each small while.

    On a CPU, bytes count from the begin of the recording. Empty where nothing was recorded.
    """
    begin, end = trace.window[0][0], trace.window[-1][1]
    device = GPU if trace.on_gpu else 0
    found = [(moment, size) for moment, kind, size in trace.memory if kind == device and begin <= moment < end]
    highest: dict[int, tuple[int, int]] = {}
    for moment, size in found:
        while_ = (moment - begin) * MAX_POINTS // (end - begin)
        if while_ not in highest or size > highest[while_][1]:
            highest[while_] = moment, size
    return [((moment - begin) / 1e6, float(size)) for _, (moment, size) in sorted(highest.items())]


def memory_chart(curves: Mapping[int, Curve]) -> str:
    """A chart of the memory of some ranks; empty where nothing was recorded."""
    found = {rank: curve for rank, curve in curves.items() if curve}
    if not found:
        return ""
    top = max(size for curve in found.values() for _, size in curve)
    unit, name = (GIB, "GiB") if top >= 2 * GIB else (MIB, "MiB")
    lines = [
        Line(f"rank {rank}", [(at, size / unit) for at, size in curve], colour=number, dots=False)
        for number, (rank, curve) in enumerate(found.items())
    ]
    return line_chart(
        "memory over the profiled steps",
        Axis("ms", lambda value: f"{value:g}"),
        Axis(f"{name} allocated", lambda value: f"{value:g}"),
        lines,
    )
