"""The guard: a step on the last node that requeues a job whose batch host is dead or frozen.

With `sbatch --no-kill`, Slurm keeps a job RUNNING whose batch script is gone with its node, until its time limit. So
the supervisor gives a sign of life every two seconds, in a file of the run folder, and the guard looks at it. It
compares no clocks, and counts its looks instead of seconds: if the shared file system hangs, it has not looked.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..base.events import append_event
from ..base.files import opened
from ..base.run_folder import RunFolder
from ..base.slurm import Slurm, patiently
from .policy import RestartLimits, why_not_requeue

BEAT = 2.0  # seconds between two signs of life, and between two looks
END_MARK = b"over\n"  # in the file: the silence from now on is intended


class Heart:
    """The supervisor's signs of life. A mark in their file shows the guard that they end on purpose."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs of life", daemon=True)

    def start(self) -> None:
        """Begin, if it has not begun."""
        if self._thread.ident is None:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(b"")
            self._thread.start()

    def stop(self) -> None:
        """Mark in the file, for the guard, that no further sign of life is meant to come."""
        if self._thread.ident is not None:
            self._over.set()
            self._write(END_MARK)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError):
                os.utime(self.path)

    def _write(self, text: bytes) -> None:
        with suppress(OSError):  # nor where the run folder was removed
            descriptor = opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(descriptor, "wb") as file:
                file.write(text)


class Guard:
    """Looks at the signs of life of a supervisor."""

    def __init__(self, beat: Path, looks: int) -> None:
        self.beat, self.looks = beat, looks
        self.still, self._before = 0, -1

    def look(self) -> str:
        """`over` if the supervisor has ended on purpose, `silent` if it gives no sign of life; else empty."""
        try:
            descriptor = opened(self.beat, os.O_RDONLY)  # for which NFS asks the server
        except FileNotFoundError:
            return "over"  # somebody has removed the run
        except OSError:
            return ""  # a file system that does not answer now may do so later
        with open(descriptor, "rb") as file:
            over, seen = file.read(len(END_MARK)) == END_MARK, os.fstat(descriptor).st_mtime_ns
        self.still = self.still + 1 if seen == self._before else 0
        self._before = seen
        return "over" if over else "silent" if self.still >= self.looks else ""


def guard(run: RunFolder, slurm: Slurm, restart: int, watch: Guard, pause: Callable[[float], object]) -> str:
    """Wait until the supervisor ends or falls silent; if it is silent, requeue the job. Returns what was done; empty if
    it ended."""
    limits = RestartLimits()
    while True:
        while not (found := watch.look()):
            pause(BEAT)
        if found == "over":
            return ""
        told = f"the batch host gave no sign of life for {watch.still * BEAT:.0f} s"
        job = patiently(slurm.job, pause, limits.patience)
        if watch.look() != "silent":  # it has come back meanwhile
            continue
        if why := why_not_requeue(job, restart, limits):
            break
        _note(run, slurm, restart, f"{told}; asking Slurm to requeue the job")
        if not (why := slurm.requeue()):
            return f"{told}; requeued"
        pause(BEAT)
    _note(run, slurm, restart, f"{told}; not requeued: {why}")
    return f"{told}; not requeued: {why}"


def _note(run: RunFolder, slurm: Slurm, restart: int, text: str) -> None:
    with suppress(OSError):
        append_event(run.events, "guard", "guard", text, job=slurm.number, restart=restart)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="guard", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--beat", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for ranks. SIGTERM ends the guard: Slurm waits for all steps
    watch = Guard(options.beat, max(2, round(options.seconds / BEAT)))
    if told := guard(RunFolder(options.run), Slurm(options.job), options.restart, watch, time.sleep):
        print(f"megalite guard: {told}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
