"""`megalite profile`: where the time of a run's profiled steps went, as a table and a page."""

import argparse
from pathlib import Path

from megalite.base.errors import InputError, counted
from megalite.base.files import write_whole
from megalite.base.terminal import console
from megalite.profiling.folder import latest_profile
from megalite.profiling.measured_step import measured_step
from megalite.profiling.page import page
from megalite.profiling.ranks import read_ranks
from megalite.profiling.tables import parts_table

PAGE, PICTURE = "index.html", "timeline.svg"


def run(args: argparse.Namespace) -> int:
    """Print the parts of the latest profiled steps of the rank that computes most, and write their page.

    Returns the exit code. Raises InputError for a folder without a profile, and for traces that cannot be read.
    """
    if len(args.arguments) != 1:
        raise InputError(f"megalite profile takes one run folder, not {len(args.arguments)}; give the path of one")
    folder = latest_profile(Path(args.arguments[0]))
    ranks = sorted(read_ranks(folder), key=lambda rank: -rank.parts.computing)
    try:
        step = measured_step(ranks)
    except InputError as error:
        told = f"its traces tell of actions that cannot have run so: {error}"
        raise InputError(f"{folder}: {told}; profile the steps again") from None
    busiest, about = ranks[0], ranks[0].about
    on = console()
    told = f"rank {about.rank}, which computes most of {counted(len(ranks), 'trace')}"
    on.print(f"steps {about.first} to {about.last}, {told}")
    on.print(parts_table(busiest.parts, about.steps, about.expected))
    write_whole(folder / PAGE, page(Path(args.arguments[0]).name, ranks, step))
    on.print(str(folder / PAGE))
    if step is None:
        on.print("no picture of actions: that needs all ranks of a pipeline, as with profile.ranks=all")
    else:
        write_whole(folder / PICTURE, step.svg())
        on.print(str(folder / PICTURE))
    if not busiest.on_gpu:
        on.print("no snapshot of memory: there is none on a CPU")
    return 0
