"""Does one task of an experiment: a run, or a trunk and then its branches. The pool and Slurm's batch scripts start it.

Ranks are started by the supervisor of `megalite_launch`, which starts them again after a crash and has Slurm requeue
the job where that helps. A runner decides from files alone, so a task may be killed and started again anywhere.
"""

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import megalite_launch
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import read_object
from megalite.base.stop_signals import STOP_SIGNALS, listen
from megalite.experiment.folder import END_STATES, MAX_STATUS_BYTES, ExperimentFolder, Status, read_status, write_status
from megalite.experiment.states import SIGNAL_BASE, ended, reached
from megalite.train.folder.lock import Lock
from megalite_launch.base.files import PRIVATE_MODE, appended
from megalite_launch.base.processes import prepared
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.base.slurm import Slurm
from megalite_launch.base.texts import escaped
from megalite_launch.supervise.local_backend import processes_of

LOOK_SECONDS = 0.05  # seconds between two looks
PATIENCE = 300.0  # seconds that processes of a runner that was killed get to save and end
LAUNCH = Path(megalite_launch.__file__).resolve().parent
START_STATES = ("planned", "submitted", "running")  # states of runs that are to be started


@dataclass(frozen=True)
class Options:
    """Options for starting the runs of a task. seconds: time after which a run saves and stops; 0: no limit."""

    megalite: str
    backend: str = "local"
    attempts: int = 3
    seconds: float = 0.0
    discard: bool = False
    nodes: int = 1
    ranks_per_node: int = 0  # 0: all ranks of a run are on one node
    srun: tuple[str, ...] = ()
    job: str = ""


@dataclass
class TaskRunner:
    """Does the runs of a task, one after another."""

    folder: ExperimentFolder
    options: Options
    asked: list[int] = field(default_factory=list)  # signals that were heard

    def hear(self, number: int, frame: object = None) -> None:
        """A handler of signals: the first asks to save and to stop, a second one kills."""
        self.asked.append(number)

    def work(self, names: Sequence[str]) -> int:
        """Do runs. Returns the exit code: DONE if all are done, STOPPED if there is more to do, else FAILED."""
        for name in names:
            self._run(name)
            found = read_status(self.folder.run(name))
            if self.asked or (found is not None and found.state == "submitted"):  # Slurm is about to end this job
                return ExitCode.STOPPED
        states = [status.state for status in map(read_status, map(self.folder.run, names)) if status is not None]
        if self.options.discard and all(state in END_STATES for state in states):  # else a branch may need its trunk's
            for name in names:
                shutil.rmtree(self.folder.run(name) / "checkpoints", ignore_errors=True)
        return ExitCode.DONE if states == ["done"] * len(names) else ExitCode.FAILED

    def _run(self, name: str) -> None:
        """Do one run, if it is not done and nobody else is at it."""
        run = self.folder.run(name)
        try:
            lock = Lock.take(run / "sweep")
        except InputError as error:
            say(f"{name}: left to another: {error}")
            if Lock.holder(run / "sweep") is None:  # there is none: the folder cannot be used
                self._give_up(run, str(error))
            return
        try:
            with lock.beating(lambda text: say(f"{name}: {text}")):
                status = read_status(run)  # now that nobody else changes it
                if status is None:
                    say(f"{name}: has no status.json that can be read; megalite-sweep launch writes it anew")
                    return
                if reached(run, status.steps, status.evaluates)[1]:
                    self._end(run, status if status.state == "done" else status.now("done", code=ExitCode.DONE), status)
                elif status.state in START_STATES and self._wait_for_others(run):
                    self._start(run, status)
        except InputError as error:  # a full disk, or something in the way of a file of the run folder
            self._give_up(run, str(error))
        except OSError as error:
            self._give_up(run, f"{error.filename or run}: {error.strerror}")
        finally:
            lock.free()

    def _give_up(self, run: Path, why: str) -> None:
        """Note, if that is possible, that a run has to wait until its folder can be written to."""
        say(f"{run.name}: {why}")
        status = read_status(run)
        if status is not None and status.state in START_STATES:
            with suppress(InputError):
                write_status(run, status.now("planned", f"its folder cannot be used: {why}"))

    def _start(self, run: Path, status: Status) -> None:
        arguments, hindrance = self._arguments(run, status)
        if hindrance is not None:
            write_status(run, hindrance)
            return
        job = self.options.job or status.job
        status = status.now("running", attempts=status.attempts + 1, job=job)
        write_status(run, status)
        began = time.monotonic()
        for _ in range(self.options.attempts):
            code, timed_out = self._supervise(run, status, arguments)
            if code <= SIGNAL_BASE or self.asked or not self._wait_for_others(run):
                break  # else somebody has killed the supervisor alone
            arguments, _ = self._arguments(run, status)
        found = ended(run, status, code, timed_out)
        if found.state in ("planned", "failed") and self._leaving():
            found = replace(found, state="submitted")  # Slurm knows whether it starts the task again; see arrays.Queue
        if len(self.asked) > 1 and found.state == "failed":
            found = found.now("planned", "was killed on request, and goes on from its newest checkpoint")
        self._end(run, replace(found, seconds=status.seconds + time.monotonic() - began), status)

    def _leaving(self) -> bool:
        """Return whether Slurm is ending this start of the job, so that what has failed was not the run."""
        if self.options.backend != "slurm" or not self.options.job:
            return False
        job = Slurm(self.options.job).job()
        return job is not None and not job.goes_on(int(os.environ.get("SLURM_RESTART_COUNT", "0")))

    def _end(self, run: Path, found: Status, before: Status) -> None:
        if found is not before:
            write_status(run, found)
            say(f"{found.name}: {found.state}{f': {found.reason}' if found.reason else ''}")

    def _arguments(self, run: Path, status: Status) -> tuple[list[str], Status | None]:
        """Return the arguments of `megalite train`; or the status of a run that cannot be started."""
        config = str(run / "run.yaml")
        if not status.start or RunFolder(run).newest_step():
            return [config], None
        parent = self.folder.run(status.parent)
        checkpoint = parent / "checkpoints" / f"step-{status.start:08d}"
        if checkpoint.is_dir():
            return [config, f"checkpoint.resume={checkpoint}"], None
        before = read_status(parent)
        if before is None or before.state in START_STATES:
            told = f"{status.parent}, from which it goes on at step {status.start}, is not as far"
            return [], status.now("planned", told)
        if before.state == "done":  # its checkpoints were removed: the same run, from the beginning
            return [config], None
        told = f"{status.parent}, from which it goes on at step {status.start}, has ended as {before.state}"
        return [], status.now(before.state, told)

    def _supervise(self, run: Path, status: Status, arguments: Sequence[str]) -> tuple[int, bool]:
        """Start the ranks under a supervisor, and wait. Returns its exit code, and whether their time was over."""
        options = self.options
        ranks = options.ranks_per_node or status.gpus
        command = [sys.executable, str(LAUNCH), "supervise", "--backend", options.backend, "--run", str(run)]
        command += ["--ranks-per-node", str(ranks), "--max-attempts", str(options.attempts)]
        command += ["--oom-ends"]  # lack of memory is a result of an experiment
        if options.backend == "slurm":
            command += ["--nodes", str(options.nodes), *(f"--srun-option={option}" for option in options.srun)]
        command += ["--", options.megalite, "train", *arguments]
        (run / "logs").mkdir(exist_ok=True)
        with appended(run / "logs" / "sweep.log") as log:
            supervisor = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=prepared(signal.SIGTERM),  # where this process is killed, the ranks save and end
            )
        limit = time.monotonic() + options.seconds if options.seconds else float("inf")
        handed_on, timed_out = 0, False
        while (code := supervisor.poll()) is None:
            if len(self.asked) > 1 and options.backend == "local":
                self._kill(run, supervisor)
            for number in self.asked[handed_on:]:
                supervisor.send_signal(number)
            handed_on = len(self.asked)
            if time.monotonic() >= limit and not timed_out:
                timed_out = True
                supervisor.send_signal(signal.SIGTERM)
            time.sleep(LOOK_SECONDS)
        return code if code >= 0 else 128 - code, timed_out

    def _kill(self, run: Path, supervisor: subprocess.Popen[bytes]) -> None:
        supervisor.kill()
        supervisor.wait()
        for attempt in RunFolder(run).attempts.glob("*"):
            for process in processes_of(attempt.absolute()):
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)

    def _wait_for_others(self, run: Path) -> bool:
        """Wait until what an earlier runner has left behind has saved and ended. Whether it has."""
        deadline = time.monotonic() + PATIENCE
        while _supervised(run) or _trains(run):
            if time.monotonic() >= deadline or self.asked:
                say(f"{run.name}: other processes are at work there still; left to them")
                return False
            time.sleep(LOOK_SECONDS)
        return True


def _supervised(run: Path) -> bool:
    """Return whether a supervisor on this machine looks after the run: it holds a lock on the events."""
    with suppress(OSError), appended(RunFolder(run).events, PRIVATE_MODE) as events:
        try:
            fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _trains(run: Path) -> bool:
    """Return whether a process of this machine trains in the run folder. Training itself checks other machines."""
    owner = Lock.holder(run)
    return owner is not None and bool(owner.alive)


def say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"megalite-sweep: {escaped(text)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do a task. Returns the exit code."""
    args = _parser().parse_args(arguments)
    folder = ExperimentFolder(args.folder)
    job, names = "", list(args.names)
    if args.launch:
        place = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
        names = read_tasks(folder, args.launch)[place]
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{place}" if array else os.environ.get("SLURM_JOB_ID", "")
    options = Options(
        args.megalite,
        args.backend,
        args.attempts,
        args.seconds,
        args.discard,
        args.nodes,
        args.ranks_per_node,
        tuple(args.srun_option),
        job,
    )
    runner = TaskRunner(folder, options)
    if args.cores:
        with suppress(OSError, ValueError, AttributeError):  # fewer than the pool took for granted: all that there are
            os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    with _heard(runner):
        return runner.work(names)


def read_tasks(folder: ExperimentFolder, launch: str) -> list[list[str]]:
    """The tasks of a job array, each with the names of its runs."""
    found = read_object(folder.launches / f"{launch}.json", MAX_STATUS_BYTES * 16)
    return [list(map(str, names)) for names in found["tasks"]]


@contextmanager
def _heard(runner: TaskRunner) -> Iterator[None]:
    before = listen(runner.hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # who starts this holds them up until there are handlers
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite-sweep task", description="Do the runs of a task, one by one.")
    parser.add_argument("folder", type=Path, help="of the experiment")
    parser.add_argument("names", nargs="*", help="of run folders, in their order")
    parser.add_argument("--launch", default="", help="of a job array: the file that lists its tasks")
    parser.add_argument("--megalite", default="megalite", help="the command")
    parser.add_argument("--backend", choices=("local", "slurm"), default="local")
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--discard", action="store_true")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=0)
    parser.add_argument("--srun-option", action="append", default=[])
    parser.add_argument("--cores", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
