"""A training job as its surroundings see it: its processes, its files and its words."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from spied_train import NODES, NOTES
from violation import Violation

LOOK = 0.0002  # seconds between two looks for the moment to kill at
START_LOOK = 0.01  # and between two for the ranks, before which there is nothing to look for
PATIENCE = 300.0  # seconds in which anything must happen that is waited for
GONE = 60.0  # seconds in which all processes of a job must end once one of them was killed


class Job:
    """`megalite train ARGUMENTS` under way in the folder `work`; a context manager that leaves no process behind.

    notes: a new folder, for what the ranks note and for what the job says. heard: lines after which nobody reads its
    stdout any more.
    """

    def __init__(self, arguments: Sequence[str], work: Path, notes: Path, heard: int | None = None) -> None:
        notes.mkdir(parents=True)
        self.notes, self.began = notes, time.monotonic()
        self._mark = f"{NOTES}={notes}".encode()
        environment = dict(os.environ) | {
            NOTES: str(notes),
            NODES: str(work / "nodes"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(work),  # what a killed launcher cannot remove goes with the rest
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spied_train", "train", *arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        pipes = (self.process.stdout, "stdout", heard), (self.process.stderr, "stderr", None)
        self._readers = [threading.Thread(target=_note, args=(pipe, notes / name, end)) for pipe, name, end in pipes]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        kill(self.alive())
        self.process.wait()
        for reader in self._readers:
            reader.join()

    @property
    def told(self) -> str:
        """What it has said; when it has ended, all of it that was read."""
        if self.process.poll() is not None and not self.alive():
            for reader in self._readers:
                reader.join()
        return (self.notes / "stdout").read_text(errors="replace") + (self.notes / "stderr").read_text(errors="replace")

    @property
    def resumed_at(self) -> tuple[int, int] | None:
        """The step and the sample that the job says it has resumed at, if it does."""
        found = re.search(r"resuming at step (\d+), sample (\d+)", self.told)
        return (int(found[1]), int(found[2])) if found else None

    def ranks(self) -> list[int]:
        """The process id of every rank that was started."""
        launcher = self.process.pid
        with suppress(OSError):
            return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
        return []

    def alive(self) -> list[int]:
        """All processes that came of this job."""
        pids = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [int(pid) for pid in pids if self._mark in _environment(pid).split(b"\0")]

    def fill_disk(self, full: bool) -> None:
        """Let every write to a file fail, or succeed again. A process may do so to another of its user."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else most, most))

    def ranks_begun(self) -> int:
        """How many ranks have been handed a batch."""
        return sum(b"\n" in path.read_bytes() for path in self.notes.glob("rank-*.jsonl"))

    def batches_begun(self) -> int:
        """How many batches the ranks have been handed, counted for each rank."""
        return sum(path.read_bytes().count(b"\n") for path in self.notes.glob("rank-*.jsonl"))

    def reads_in(self, folder: Path) -> bool:
        """Whether a rank has a file in `folder` open."""
        inside = f"{folder}/"
        for pid in self.ranks():
            with suppress(OSError):
                for descriptor in os.scandir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        if os.readlink(descriptor.path).startswith(inside):
                            return True
        return False

    def wait_for(self, happened: Callable[[], bool], look: float = LOOK) -> bool:
        """False if the job has ended without it. Raises Violation if neither comes."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise Violation(f"{self.notes}: nothing has happened for {PATIENCE:.0f} s")
            time.sleep(look)
        return True

    def wait_for_end(self) -> None:
        """Raises Violation if the job stops training and does not end."""
        begun = -1
        while self.process.poll() is None:
            before, begun = begun, self.batches_begun()
            if begun == before:
                raise Violation(f"{self.notes}: nothing has happened for {PATIENCE:.0f} s")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)

    def victims(self, who: str, rng: random.Random) -> tuple[list[int], int | None]:
        """Processes of the whole `job`, its `launcher` or one `rank`; which rank that is."""
        ranks, launcher = self.ranks(), self.process.pid
        if who == "rank":
            rank = rng.randrange(len(ranks))
            return [ranks[rank]], rank
        return [launcher, *ranks] if who == "job" else [launcher], None

    def wait_until_gone(self) -> float:
        """Seconds until no process of the job is left. Raises Violation if one stays."""
        began = time.monotonic()
        try:
            self.process.wait(GONE)
        except subprocess.TimeoutExpired:
            raise Violation(f"{self.notes}: the launcher still runs {GONE:.0f} s after a rank was killed") from None
        while left := self.alive():
            if time.monotonic() - began > GONE:
                raise Violation(f"{self.notes}: processes {left} still run {GONE:.0f} s after the kill")
            time.sleep(0.02)
        return time.monotonic() - began


def _note(pipe: IO[bytes], path: Path, end: int | None) -> None:
    """Copy lines to a file, and leave after `end` of them."""
    with pipe, path.open("wb", buffering=0) as file:
        for number, line in enumerate(pipe, start=1):
            file.write(line)
            if number == end:
                return


def kill(pids: Sequence[int]) -> None:
    """SIGKILL them, one right after the other, and wait until the kernel has ended them.

    Its word to the ranks of a killed launcher comes last: on a busy machine they have made steps by then.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(LOOK)


def _runs(pid: int) -> bool:
    """Whether a process is there, and does not only wait for its parent to notice its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False


def _environment(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
