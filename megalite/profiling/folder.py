"""Names of the files of profiled steps in a run folder."""

import re
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import is_folder

FOLDER, STEP = "profile", "step-{step:06}"
TRACE, SNAPSHOT = "rank-{rank}.json.gz", "rank-{rank}.memory.pickle"
STEP_NAME, TRACE_NAME = re.compile(r"step-([0-9]{6,15})"), re.compile(r"rank-(0|[1-9][0-9]{0,7})\.json\.gz")


def folder_of(run: Path, step: int) -> Path:
    """The folder of the profile that begins with `step`."""
    return run / FOLDER / STEP.format(step=step)


def latest_profile(run: Path) -> Path:
    """The folder of the latest profiled steps of a run. Raises InputError if there is none, or a link."""
    parent = run / FOLDER
    names = [path.name for path in parent.iterdir()] if is_folder(parent) else []
    steps = [int(found[1]) for name in names if (found := STEP_NAME.fullmatch(name))]
    if not steps:
        raise InputError(f"{run}: has no profile; train with profile.start=STEP to make one")
    latest = folder_of(run, max(steps))
    check_no_link(latest)
    if not is_folder(latest):
        raise InputError(f"{latest}: is no folder of profiled steps; remove it, or give it another name")
    return latest


def step_of(folder: Path) -> int:
    """The step with which a profile begins, from the name of its folder."""
    return int(folder.name.rpartition("-")[2])


def check_no_link(folder: Path) -> None:
    """Raises InputError if the folder of profiled steps, or the one around it, is a link out of the run folder."""
    for each in (folder.parent, folder):
        if each.is_symlink():
            raise InputError(f"{each}: is a link, which is not followed; put a folder in its place")


def traces_in(folder: Path) -> dict[int, Path]:
    """The traces of profiled steps, by rank, in its order. Raises InputError if there is none."""
    found = {int(name[1]): path for path in folder.iterdir() if (name := TRACE_NAME.fullmatch(path.name))}
    if not found:
        raise InputError(f"{folder}: has no trace; it is written when the last profiled step has ended")
    return dict(sorted(found.items()))
