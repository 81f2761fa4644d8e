"""Runs tasks on this machine: so many at a time, each on cores or GPUs of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megalite.base.errors import InputError, counted, printable
from megalite.base.exit_codes import ExitCode
from megalite.base.stop_signals import listen, restore
from megalite.base.terminal import escaping
from megalite.experiment.folder import END_STATES, ExperimentFolder, read_status
from megalite_launch.base.files import appended
from megalite_launch.base.processes import prepared

LOOK_SECONDS = 0.1  # seconds between two looks at the tasks
PROGRESS_SECONDS = 2.0  # seconds between two looks at the files of their runs
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE = re.compile(r"nvidia\d+")  # in /dev, one for each GPU
MAX_LISTED = 3  # names of runs that the progress shows


@dataclass(frozen=True)
class Task:
    """Runs that are done one after another, each with so many ranks."""

    names: tuple[str, ...]
    gpus: int


@dataclass(frozen=True)
class LocalMachine:
    """Cores and GPUs that the pool may use. devices: as in CUDA_VISIBLE_DEVICES; none for runs on CPUs."""

    cores: tuple[int, ...]
    devices: tuple[str, ...] = ()

    @staticmethod
    def this(cores: int | None, devices: Sequence[int] | None, on_gpus: bool) -> "LocalMachine":
        """Return this machine, or the part that was asked for. Raises InputError for cores or GPUs it does not have."""
        own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        if cores is not None and cores > len(own):
            raise InputError(
                f"launch.cores = {cores}: this process may use {counted(len(own), 'core')}; ask for no more"
            )
        found = _visible() if on_gpus else []
        if on_gpus and devices is not None:
            if unknown := [str(each) for each in devices if str(each) not in found]:
                raise InputError(
                    f"launch.devices: there is no GPU {unknown[0]}; there are {', '.join(found) or 'none'}"
                )
            found = [str(each) for each in devices]
        return LocalMachine(tuple(own[:cores]), tuple(found))


def _visible() -> list[str]:
    if VISIBLE_DEVICES in os.environ:
        return [name for name in os.environ[VISIBLE_DEVICES].split(",") if name]
    return [str(number) for number in range(sum(bool(DEVICE.fullmatch(name)) for name in os.listdir("/dev")))]


@dataclass
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    slot: int
    devices: tuple[str, ...]


@dataclass
class Pool:
    """Runs tasks. command: the arguments of `runner` for a task, without its runs."""

    folder: ExperimentFolder
    machine: LocalMachine
    parallel: int
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    pause: Callable[[float], object] = time.sleep
    _running: list[_Running] = field(default_factory=list)
    _asked: int = 0

    def run(self, tasks: Iterable[Task]) -> int:
        """Run all tasks. Returns DONE, or STOPPED if a signal came: then runs save first; a second one kills them."""
        waiting = list(tasks)
        for task in waiting:
            if self.machine.devices and task.gpus > len(self.machine.devices):
                told = f"needs {counted(task.gpus, 'GPU')}, and this machine has {len(self.machine.devices)}"
                raise InputError(f"{task.names[0]}: {told}; use launch.kind: slurm, or fewer ranks")
        handlers = listen(self._hear)
        try:
            with self._progress(waiting) as progress:
                self._work(waiting, progress)
        finally:
            restore(handlers)
            for each in self._running:  # only after an error of our own
                with suppress(OSError):
                    each.process.terminate()
        return ExitCode.STOPPED if self._asked else ExitCode.DONE

    def _work(self, waiting: list[Task], progress: "_Shown") -> None:
        told = 0
        while self._running or (waiting and not self._asked):
            if not self._asked:
                self._start_some(waiting)
            if self._asked > told:
                for each in self._running:
                    with suppress(OSError):
                        each.process.send_signal(signal.SIGTERM)
                progress.say("stopping: runs save and end; once more kills them" if not told else "killing runs")
                told = self._asked
            progress.show([each.task for each in self._running])
            for each in [each for each in self._running if each.process.poll() is not None]:
                self._running.remove(each)
                progress.ended(each.task, each.process.returncode)
            self.pause(LOOK_SECONDS)

    def _start_some(self, waiting: list[Task]) -> None:
        """Start the first tasks for which there is room; a small one may pass a large one that waits for GPUs."""
        for task in list(waiting):
            taken = {each.slot for each in self._running}
            slot = next((slot for slot in range(self.parallel) if slot not in taken), None)
            if slot is None:
                return
            busy = {device for each in self._running for device in each.devices}
            free = [device for device in self.machine.devices if device not in busy]
            if self.machine.devices and len(free) < task.gpus:
                continue
            waiting.remove(task)
            self._running.append(self._started(task, slot, tuple(free[: task.gpus])))

    def _started(self, task: Task, slot: int, devices: tuple[str, ...]) -> _Running:
        cores = self._cores(slot)
        environment = {**self.environment}
        if devices:
            environment[VISIBLE_DEVICES] = ",".join(devices)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // task.gpus)))
        command = [sys.executable, "-m", "megalite.experiment.runner", str(self.folder.path), *task.names]
        command += ["--cores", ",".join(map(str, cores)), *self.command]
        with self._log() as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches all of the terminal's processes: this one tells the others
                preexec_fn=prepared(signal.SIGTERM),
            )
        return _Running(task, process, slot, devices)

    def _log(self) -> IO[bytes]:
        """Open the log of the runners' output. Raises InputError where it cannot be written to."""
        path = self.folder.launches / "local.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return appended(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be written to: {error.strerror}") from error

    def _cores(self, slot: int) -> tuple[int, ...]:
        """The cores of a slot: an even share; with fewer cores than slots, all of them."""
        cores, parallel = self.machine.cores, self.parallel
        share = len(cores) // parallel
        return cores if share == 0 else cores[slot * share : (slot + 1) * share]

    def _hear(self, number: int, frame: object) -> None:
        self._asked += 1

    def _progress(self, tasks: Sequence[Task]) -> "_Shown":
        return _Shown(self.folder, sum(len(task.names) for task in tasks))


class _Shown:
    """Tells how many runs have ended, and how: a bar on a terminal, else a line for every run."""

    def __init__(self, folder: ExperimentFolder, total: int) -> None:
        console = escaping(Console(stderr=True))
        self.folder, self.terminal = folder, console.is_terminal
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=console, disable=not self.terminal)
        self.task = self.bar.add_task("", total=total)
        self.told: set[str] = set()  # names of runs that have ended
        self.next_look = 0.0

    def __enter__(self) -> "_Shown":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, tasks: Sequence[Task]) -> None:
        """Name the runs at work, and tell which of them are done: a trunk may be long before its branches."""
        if (now := time.monotonic()) >= self.next_look:
            self.next_look = now + PROGRESS_SECONDS
            for task in tasks:
                self._tell(task)
        names = [name for task in tasks for name in task.names if name not in self.told]
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        self.bar.update(self.task, description=", ".join(names[:MAX_LISTED]) + more)

    def say(self, text: str) -> None:
        self.bar.console.print(f"megalite-sweep: {text}", markup=False, highlight=False, soft_wrap=True)

    def ended(self, task: Task, code: int) -> None:
        """code: with which the task's runner has ended."""
        self._tell(task, code)
        self.bar.advance(self.task, len(set(task.names) - self.told))
        self.told.update(task.names)

    def _tell(self, task: Task, code: int | None = None) -> None:
        """Tell how the runs of a task have ended; while its runner is at work (None), of those that are done."""
        for name in task.names:
            status = None if name in self.told else read_status(self.folder.run(name))
            if status is not None and (code is not None or status.state == "done"):
                told = f": {printable(status.reason)}" if status.reason else f" after {status.seconds:.0f} s"
                if status.state not in END_STATES and not status.reason:
                    told = f": its runner has ended with exit code {code}; launches/local.log tells more"
                self.say(f"{status.state:<9} {name}{told}")
                self.told.add(name)
                self.bar.advance(self.task)
