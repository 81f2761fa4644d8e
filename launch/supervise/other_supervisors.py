"""Search for other supervisors at work in a run folder: the decisions of two at a time would be a muddle.

A supervisor of a Slurm job gives signs of life, which are seen on every node. One on a machine of its own locks the
events of the run. File systems without locks are left to the lock that training has.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.events import Event
from ..base.files import PRIVATE_MODE, opened
from ..base.run_folder import RunFolder
from .batch_host_guard import BEAT, END_MARK

MAX_SILENCE = 3 * BEAT  # seconds without a sign of life, after which a supervisor is taken for dead
POLL_SECONDS = 0.2


def lock(run: RunFolder) -> int | None:
    """Lock the events of a run until this process ends; the open file. None if another process has locked them.

    Raises OSError where that cannot be done.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    descriptor = opened(run.events, os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def submitting(run: RunFolder) -> Iterator[None]:
    """Let one process at a time look whether a job of the run is there, and submit one; others wait for it."""
    folder = run.path / "launch"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = opened(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def local_rival(run: RunFolder, events: Sequence[Event]) -> str:
    """The supervisor on a machine of its own that is at work in the folder; empty if there is none."""
    jobs = [str(event.get("job")) for event in _begun(events) if event.get("backend") == "local"]
    if not jobs:
        return ""
    with suppress(OSError):
        descriptor = lock(run)
        if descriptor is None:
            return f"another supervisor ({jobs[-1]})"
        os.close(descriptor)
    return ""


def slurm_rival(run: RunFolder, events: Sequence[Event], pause: Callable[[float], None] = time.sleep) -> str:
    """The Slurm job whose supervisor is at work in the folder; empty if there is none.

    Where one has not told its end, waits up to `MAX_SILENCE` seconds for a sign of life.
    """
    beats = {
        str(event.get("job")): run.attempts / f"{event.get('job')}.{event.get('restart')}.beat"
        for event in _begun(events)
        if event.get("backend") == "slurm"
    }
    before = {job: beat for job, path in beats.items() if (beat := _beat(path)) is not None}
    for _ in range(round(MAX_SILENCE / POLL_SECONDS) if before else 0):
        pause(POLL_SECONDS)
        for job, beat in before.items():
            if _beat(beats[job]) not in (beat, None):
                return f"Slurm job {job}"
    return ""


def _begun(events: Sequence[Event]) -> list[Event]:
    """The beginnings of supervisors that have not told their end since, oldest first."""
    begun: dict[object, Event] = {}
    for event in events:
        job = str(event.get("job"))
        if event["event"] in ("begin", "end", "requeue"):
            begun.pop(job, None)
        if event["event"] == "begin":
            begun[job] = event
    return list(begun.values())


def _beat(path: Path) -> int | None:
    """Time of the latest sign of life in ns, on whatever clock; None if no other is meant to come."""
    try:
        with open(opened(path, os.O_RDONLY), "rb") as file:  # for which NFS asks the server
            return None if file.read(len(END_MARK)) == END_MARK else os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
