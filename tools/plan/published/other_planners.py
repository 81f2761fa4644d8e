"""Step times that other planners have predicted for published runs, from a CSV file. Imports no torch.

A line names the program, its version and settings, the run by file and line, the seconds measured there, by which a run
is recognized when lines have moved, and the seconds predicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from megalite.base.errors import InputError
from megalite_tools.plan.published.rows import Row, lines_of
from megalite_tools.plan.published.score import Compared, timed

COLUMNS = ["program", "version", "settings", "file", "line", "measured", "seconds"]
DIGITS = 1e-4  # relative: by which a rounded time differs


@dataclass(frozen=True)
class Peer:
    """Predictions of one run by another planner and by megalite. program: with its version and settings."""

    program: str
    theirs: Compared
    ours: Compared


def read_peers(path: Path, rows: Iterable[Row]) -> list[Peer]:
    """The predictions in a file, of those of its runs that are among `rows`.

    Raises InputError for another file, and for a run that is not the one that was predicted.
    """
    ours = {(each.row.file, each.row.line): each for each in timed(rows)}
    files = {file for file, _ in ours}
    lines = lines_of(path)
    if next(lines, (0, []))[1] != COLUMNS:
        raise InputError(f"{path}: the first line must be {','.join(COLUMNS)}")
    found = []
    for number, values in lines:
        if not values:
            continue
        place = f"{path}:{number}"
        try:
            program, version, settings, file, line, measured, seconds = values
            run, times = (file, int(line)), (float(measured), float(seconds))
        except ValueError:
            raise InputError(f"{place}: must have {len(COLUMNS)} fields, of which the last three are numbers") from None
        if not all(0 < time < float("inf") for time in times):
            raise InputError(f"{place}: measured and seconds must be above 0")
        if file not in files:
            continue
        if run not in ours or not isclose(ours[run].measured, times[0], rel_tol=DIGITS):
            raise InputError(f"{place}: {file}:{line} is no run of {measured} s; predict its runs anew")
        our = ours[run]
        theirs = Compared(our.row, times[1], our.measured, 0.0)
        found.append(Peer(f"{program} {version}, {settings}", theirs, our))
    return found
