"""Chooses the runs of an experiment to start, and starts them: the story of `megalite-sweep launch`."""

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import exists, write_whole
from megalite.config.load import escaped
from megalite.config.yaml import read_mapping, read_text
from megalite.distributed.start.host import on_cpus
from megalite.experiment.arrays import Queue, submit
from megalite.experiment.cell import Cell
from megalite.experiment.expand import Expanded, expand
from megalite.experiment.folder import (
    END_STATES,
    ExperimentFolder,
    State,
    Status,
    read_status,
    write_index,
    write_status,
)
from megalite.experiment.pool import LocalMachine, Pool, Task
from megalite.experiment.read import BASE, FILE, Setup
from megalite.experiment.results import Row, row_of
from megalite.experiment.states import standing
from megalite.train.folder.lock import Lock
from megalite_launch.base.files import PRIVATE_MODE

COMMAND = "megalite-sweep"
HEADING = "all runs of the experiment "  # words in the first line of base.yaml
Known = dict[str, tuple[Status, int]]  # by id, each with the step that it has reached


def survey(expanded: Expanded) -> Known:
    """Return the status of every run, from its files and Slurm as they are now. Changes nothing."""
    folder = ExperimentFolder(expanded.setup.folder)
    names = {cell.id: cell.name for cell in expanded.cells}
    statuses = [(cell, _status_of(cell, read_status(folder.run(cell.name)), names)) for cell in expanded.cells]
    queue = Queue(folder, [status for _, status in statuses])
    found: Known = {}
    for cell, status in statuses:
        status, step = standing(folder.run(cell.name), status)
        if status.state in ("running", "submitted"):
            status = _alive(folder.run(cell.name), queue.now(status), step)
        found[cell.id] = status, step
    return found


def _status_of(cell: Cell, kept: Status | None, names: Mapping[str, str]) -> Status:
    """The status of a cell: its identity comes from the experiment, its state from its file."""
    status = kept if kept is not None and kept.id == cell.id else Status(cell.id, cell.name, cell.kind, 1, 1)
    return replace(
        status,
        name=cell.name,
        kind=cell.kind,
        gpus=cell.gpus,
        steps=cell.steps,
        seed=cell.seed,
        rung=cell.rung,
        axes=dict(cell.axes),
        parent=names.get(cell.parent, ""),
        start=cell.start if cell.parent in names else 0,
        evaluates=cell.evaluates,
    )


def _alive(run: Path, status: Status, step: int) -> Status:
    """The status of a run that is said to be under way: planned if its runner on this machine is gone."""
    if status.launch or status.state not in ("running", "submitted"):
        return status
    owner = Lock.holder(run / "sweep")
    if owner is None or owner.alive is False:
        return status.now("planned", f"was interrupted at step {step}, and goes on from its newest checkpoint")
    return status


def settle(expanded: Expanded, known: Known) -> None:
    """Write the status of runs whose runner or job ended without doing so. Runs that are under way are left alone."""
    folder = ExperimentFolder(expanded.setup.folder)
    for cell in expanded.cells:
        run, (status, _) = folder.run(cell.name), known[cell.id]
        kept = read_status(run)
        if kept is not None and kept.state != status.state and Lock.holder(run / "sweep") is None:
            write_status(run, status)


def write_files(expanded: Expanded, known: Known) -> None:
    """Write the experiment as it is resolved, and the index."""
    setup = expanded.setup
    folder = ExperimentFolder(setup.folder)
    check_folder(setup)
    settle(expanded, known)
    write_whole(folder.path / BASE, base_text(setup), PRIVATE_MODE)
    write_whole(folder.path / FILE, setup.resolved(), PRIVATE_MODE)
    rebuild_index(folder, expanded, known)


def check_folder(setup: Setup) -> None:
    """Raises InputError if the experiment's files would replace those of people, or of another kind of experiment.

    `base.yaml` is the first to be written, and tells by its heading who has written both.
    """
    base, file = setup.folder / BASE, setup.folder / FILE
    remedy = f"{setup.folder} is where this experiment is kept: change experiment.name or experiment.dir, or move it"
    for path in (base, file):
        if exists(path) and not _ours(base):
            raise InputError(f"{path}: was not written by megalite-sweep, which would replace it; {remedy}")
    about = read_mapping(file).get("experiment") if exists(file) else None
    kind = about.get("kind") if isinstance(about, dict) else None
    if kind is not None and kind != setup.kind:
        raise InputError(f"{file}: is of an experiment of the kind {kind!s:.40}, not {setup.kind}; {remedy}")


def _ours(base: Path) -> bool:
    try:
        return HEADING in read_text(base).partition("\n")[0]
    except (OSError, ValueError):
        return False


def rebuild_index(folder: ExperimentFolder, expanded: Expanded, known: Known) -> int:
    """Write `index.csv`. Returns how many runs in the folder are not the experiment's any more; they come last."""
    others = []
    for id_, name in folder.names().items():
        status = None if id_ in known else read_status(folder.run(name))
        if status is not None:
            others.append(standing(folder.run(name), status))
    axes = dict.fromkeys([*expanded.axes, *(key for status, _ in others for key in status.axes)])
    write_index(folder, [*(known[cell.id] for cell in expanded.cells), *others], list(axes))
    return len(others)


def base_text(setup: Setup) -> str:
    """The configuration that all runs start from, as a file that `megalite train` reads."""
    return as_yaml(setup.base, f"# Configuration that {HEADING}{setup.experiment.experiment.name} start from.")


def as_yaml(plain: Mapping[str, Any], heading: str) -> str:
    """A configuration as YAML, a line for each section. Texts are quoted, so none can be taken for something else."""
    lines = [f"{section}: {json.dumps(value, ensure_ascii=False)}" for section, value in plain.items()]
    return "\n".join([heading, *lines, ""])


def chosen(expanded: Expanded, known: Known, only: Collection[State]) -> list[Cell]:
    """The runs to start: those that are planned, or those in one of the states `only`."""
    wanted = set(only) or {"planned"}
    return [cell for cell in expanded.cells if known[cell.id][0].state in wanted]


def tasks_of(cells: Sequence[Cell]) -> list[Task]:
    """The cells as tasks: a run that goes on from another one is done after it, in the same task."""
    ids = {cell.id: cell for cell in cells}
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.parent if cell.parent in ids else cell.id, []).append(cell)
    found = []
    for first, group in groups.items():
        ordered = sorted(group, key=lambda cell: (cell.id != first, cell.start))
        found.append(Task(tuple(cell.name for cell in ordered), max(cell.gpus for cell in group)))
    return found


def prepare(expanded: Expanded, cells: Sequence[Cell], known: Known, surveyed: float) -> None:
    """Write the folders of runs that are about to be started.

    surveyed: when `known` was found out. A run that another launcher has taken up since is left to that one.
    """
    folder = ExperimentFolder(expanded.setup.folder)
    heading = f"# A run of the experiment {expanded.setup.experiment.experiment.name}, which megalite-sweep starts."
    for cell in cells:
        run = folder.run(cell.name)
        latest = read_status(run)
        if latest is not None and latest.since > surveyed:
            continue
        write_whole(run / "run.yaml", as_yaml(escaped(cell.plain), heading), PRIVATE_MODE)
        status = known[cell.id][0]
        if status.state != "planned":
            status = status.now("planned", f"was {status.state}: {status.reason}" if status.reason else "")
        write_status(run, replace(status, launch="", place=0, job=""))


@contextmanager
def alone(setup: Setup) -> Iterator[None]:
    """Keep other launchers out while runs are submitted to Slurm: they would submit the same ones. Raises InputError.

    On this machine launchers may work side by side: a run's own lock lets one of them start it.
    """
    if setup.experiment.launch.kind != "slurm":
        yield
        return
    try:
        lock = Lock.take(setup.folder)
    except InputError:
        if (owner := Lock.holder(setup.folder)) is None:
            raise
        told = f"another {COMMAND} launch submits runs of this experiment, {owner}"
        raise InputError(f"{setup.folder}: {told}; wait for its end, and launch again") from None
    try:
        with lock.beating(lambda lost: print(f"{COMMAND}: {lost}", file=sys.stderr, flush=True)):
            yield
    finally:
        lock.free()


def start(expanded: Expanded, cells: Sequence[Cell], megalite: str) -> int | list[tuple[str, int]]:
    """Start runs whose folders are prepared: on this machine, until all have ended, or by Slurm, and return at once.

    Returns the exit code of the pool, or the job arrays.
    """
    setup = expanded.setup
    launch, folder = setup.experiment.launch, ExperimentFolder(setup.folder)
    tasks = tasks_of(cells)
    if launch.kind == "slurm":
        return submit(folder, tasks, launch, megalite)
    on_gpus = not on_cpus(cells[0].config.run.device)
    machine = LocalMachine.this(launch.cores, launch.devices, on_gpus)
    command = ["--megalite", megalite, "--attempts", str(launch.attempts)]
    command += ["--seconds", str(60 * launch.minutes)] if launch.minutes is not None else []
    command += ["--discard"] if launch.discard else []
    return Pool(folder, machine, launch.parallel, command).run(tasks)


def expanded_now(setup: Setup) -> tuple[Expanded, Known]:
    """The experiment with all rounds of successive halving that its results tell, and how its runs stand."""
    expanded = expand(setup)
    known = survey(expanded)
    metric = setup.experiment.halving.metric if setup.experiment.halving is not None else ""
    while expanded.later:
        found = {row["id"]: row for row in rows(expanded, known)}

        def loss(cell: Cell, found: Mapping[str, Row] = found, known: Known = known) -> float | None:
            """The loss of a run; infinite if it has ended without one, None if it has neither ended nor a loss."""
            state = known[cell.id][0].state if cell.id in known else "planned"
            value = found[cell.id].get(metric) if cell.id in found else None
            return value if value is not None else float("inf") if state in END_STATES else None

        further = expand(setup, loss)
        if len(further.cells) == len(expanded.cells):
            return expanded, known
        expanded, known = further, survey(further)
    return expanded, known


def rows(expanded: Expanded, known: Known) -> list[Row]:
    """Return the measurements so far of runs that have begun."""
    folder = ExperimentFolder(expanded.setup.folder)
    begun = (cell for cell in expanded.cells if known[cell.id][1])
    return [row_of(cell, *known[cell.id], folder.run(cell.name)) for cell in begun]


def spent(expanded: Expanded, known: Known) -> float:
    """GPU-hours that the runs of the experiment have taken so far."""
    return sum(known[cell.id][0].seconds * cell.gpus for cell in expanded.cells) / 3600
