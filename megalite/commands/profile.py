"""`megalite profile`: where the time of a run's profiled steps went, as a table and a page."""

import argparse
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import write_whole
from megalite.base.terminal import console
from megalite.profiling.actions import measured_step
from megalite.profiling.breakdown import breakdown
from megalite.profiling.expected import Expected
from megalite.profiling.folder import latest_profile, traces_in
from megalite.profiling.page import page
from megalite.profiling.tables import parts_table
from megalite.profiling.trace import read_trace

PAGE, PICTURE = "index.html", "timeline.svg"


def run(args: argparse.Namespace) -> int:
    """Print the parts of the latest profiled steps of the rank that computes most, and write their page.

    Returns the exit code. Raises InputError for a folder without a profile, and for traces that cannot be read.
    """
    if len(args.arguments) != 1:
        raise InputError(f"megalite profile takes one run folder, not {len(args.arguments)}; give the path of one")
    folder = latest_profile(Path(args.arguments[0]))
    traces = [read_trace(path) for path in traces_in(folder)]
    found = sorted(((trace, breakdown(trace)) for trace in traces), key=lambda pair: -pair[1].computing)
    busiest, parts = found[0]
    step = measured_step(traces)
    on = console()
    on.print(f"steps {busiest.about['first']} to {busiest.about['last']}, rank {busiest.rank}, which computes most")
    on.print(parts_table(parts, busiest.steps, Expected.read(busiest.about)))
    write_whole(folder / PAGE, page(Path(args.arguments[0]).name, found, step))
    on.print(str(folder / PAGE))
    if step is None:
        on.print("no picture of actions: that needs all ranks of a pipeline, as with profile.ranks=all")
    else:
        write_whole(folder / PICTURE, step.svg())
        on.print(str(folder / PICTURE))
    if not busiest.on_gpu:
        on.print("no snapshot of memory: there is none on a CPU")
    return 0
