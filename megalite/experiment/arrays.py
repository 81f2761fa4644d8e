"""Runs under Slurm: a job array for every resource shape, in chunks that Slurm takes. The launcher may end then."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import as_json, read_object, write_whole
from megalite.experiment.folder import MAX_STATUS_BYTES, ExperimentFolder, Status, read_status, write_status
from megalite.experiment.pool import Task
from megalite.experiment.schema import Launch
from megalite_launch.base.errors import UserError
from megalite_launch.base.slurm import Call, call
from megalite_launch.submit.slurm_array import Array, array_script, element_states, largest_array, submitted
from megalite_launch.submit.slurm_script import CORES

WARNING_SECONDS = 300  # seconds before the time limit in which a run saves
MAX_TASKS = 1000  # tasks of an array, whatever Slurm allows: its file stays small
END_STATES = ("COMPLETED", "CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "REVOKED")


@dataclass(frozen=True)
class ArrayResources:
    """The resources of a run."""

    nodes: int
    ranks: int  # on each node

    @staticmethod
    def of(gpus: int, launch: Launch, name: str) -> "ArrayResources":
        per_node = launch.gpus_per_node
        if gpus > per_node and gpus % per_node:
            raise InputError(
                f"launch.gpus_per_node = {per_node}: {name} has {gpus} ranks, which do not fill whole nodes; "
                "change one of them"
            )
        return ArrayResources(max(1, gpus // per_node), min(gpus, per_node))


def submit(
    folder: ExperimentFolder, tasks: Sequence[Task], launch: Launch, megalite: str, ask: Call = call
) -> list[tuple[str, int]]:
    """Submit tasks. Returns the ids of the job arrays, each with the number of its tasks. Raises InputError.

    At most `launch.parallel` tasks of a shape run at a time: an array begins when the one before has ended.
    """
    if shutil.which("sbatch") is None and ask is call:
        raise InputError(
            "sbatch: is not on the PATH; run this on a login node of a Slurm cluster, or use launch.kind: local"
        )
    shapes: dict[ArrayResources, list[Task]] = {}
    for task in tasks:
        shapes.setdefault(ArrayResources.of(task.gpus, launch, task.names[0]), []).append(task)
    size = min(largest_array(ask), MAX_TASKS)
    found = []
    for shape, alike in shapes.items():
        after = ""
        for first in range(0, len(alike), size):
            chunk = alike[first : first + size]
            after = _submit_one(folder, chunk, shape, launch, megalite, after, ask)
            found.append((after, len(chunk)))
    return found


def _submit_one(
    folder: ExperimentFolder,
    chunk: Sequence[Task],
    shape: ArrayResources,
    launch: Launch,
    megalite: str,
    after: str,
    ask: Call,
) -> str:
    """Submit one array. Returns the id of its job.

    Runs are noted as submitted before that, so that a task which begins at once has the last word.
    """
    name = _new_name(folder)
    command = [sys.executable, "-m", "megalite.experiment.runner", str(folder.path), "--launch", name]
    command += ["--backend", "slurm", "--megalite", megalite, "--attempts", str(launch.attempts)]
    command += ["--nodes", str(shape.nodes), "--ranks-per-node", str(shape.ranks)]
    command += ["--discard"] if launch.discard else []
    command += [f"--srun-option={option}" for option in launch.srun]
    options = {key: "" if value is True else str(value) for key, value in launch.sbatch.items() if value is not False}
    if launch.minutes is not None:
        options.setdefault("time", str(max(1, round(launch.minutes))))
    if launch.cpus_per_task is not None:
        options.setdefault("cpus-per-task", str(launch.cpus_per_task))
    if not launch.cpus_only:
        options.setdefault("gpus-per-node", str(shape.ranks))
        if "cpus-per-gpu" not in options:
            options.setdefault("cpus-per-task", CORES)
    limit = 60 * launch.minutes if launch.minutes is not None else float("inf")
    array = Array(
        name=f"{folder.path.name}-{name}",
        tasks=len(chunk),
        parallel=launch.parallel,
        nodes=shape.nodes,
        ranks=shape.ranks,
        log=folder.launches.absolute() / f"{name}-%a.log",
        warning=int(min(WARNING_SECONDS, max(limit / 4, 1))),
        options=options,
        after=after,
        command=command,
    )
    try:
        text = array_script(array)
    except UserError as error:
        raise InputError(f"launch.sbatch: {error}") from None
    script = folder.launches / f"{name}.sbatch"
    write_whole(script, text)
    record = {"job": None, "script": str(script), "tasks": [list(task.names) for task in chunk]}
    write_whole(folder.launches / f"{name}.json", as_json(record))
    before = _note_submitted(folder, chunk, name)
    job, why = submitted(script, ask)
    if why:
        for status in before:
            write_status(folder.run(status.name), status)
        raise InputError(f"sbatch {script}: {why}")
    write_whole(folder.launches / f"{name}.json", as_json({**record, "job": job}))
    return job


def _note_submitted(folder: ExperimentFolder, chunk: Sequence[Task], launch: str) -> list[Status]:
    """Note runs as submitted; what they were before."""
    before = []
    for place, task in enumerate(chunk):
        for name in task.names:
            status = read_status(folder.run(name))
            if status is not None:
                before.append(status)
                write_status(folder.run(name), status.now("submitted", launch=launch, place=place, job=""))
    return before


def _new_name(folder: ExperimentFolder) -> str:
    """A number that no launch has had; its file is made, so that no other launcher gets it."""
    folder.launches.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        name = f"{number:03d}"
        try:
            (folder.launches / f"{name}.json").open("x").close()
            return name
        except FileExistsError:
            continue
    raise AssertionError


class Queue:
    """The states of an experiment's runs in Slurm, which is asked once."""

    def __init__(self, folder: ExperimentFolder, statuses: Sequence[Status], ask: Call = call) -> None:
        launches = {status.launch for status in statuses if status.launch and status.state in ("submitted", "running")}
        self.jobs = {launch: job for launch in sorted(launches) if (job := _job_of(folder.launches / f"{launch}.json"))}
        self.states = element_states(sorted(set(self.jobs.values())), ask) if self.jobs else {}

    def now(self, status: Status) -> Status:
        """The status of a run that was submitted, as its job stands."""
        if status.state not in ("submitted", "running") or not status.launch or self.states is None:
            return status
        job = self.jobs.get(status.launch)
        if job is None:
            return status.now("planned", "was never submitted")
        task = f"{job}_{status.place}"
        state = self.states.get(task, "")
        if not state or state in END_STATES:
            told = f"job {task} is {state}" if state else f"Slurm no longer knows job {task}"
            return status.now("planned", f"{told}, and the run is not done")
        if status.state == "submitted" and state in ("TIMEOUT", "OUT_OF_MEMORY", "FAILED"):
            return status.now("planned", f"job {task} is {state}, before it came to this run")
        if state in ("TIMEOUT", "OUT_OF_MEMORY", "FAILED"):
            ends = {"TIMEOUT": "timeout", "OUT_OF_MEMORY": "oom", "FAILED": "failed"}
            return status.now(ends[state], f"job {task} is {state}")  # type: ignore[arg-type]
        return status


def _job_of(path: Path) -> str:
    """The job of a launch; empty if its launcher was killed before it knew."""
    try:
        found = read_object(path, 16 * MAX_STATUS_BYTES).get("job")
    except InputError:
        return ""
    return found if isinstance(found, str) else ""
