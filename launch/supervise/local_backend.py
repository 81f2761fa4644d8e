"""Ranks of this machine, under a launcher such as `megalite train`: restarted here after a crash or a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..base.events import Event
from ..base.processes import prepared
from ..base.run_folder import ATTEMPT, RunFolder, node_name
from ..base.slurm import SlurmJob
from . import other_supervisors
from .backend import Pause, Start, ask, environment

KILL_SECONDS = 5.0  # seconds that killed processes get to disappear


@dataclass
class LocalRanks:
    """A launcher and its ranks, all of which have the folder of their attempt in their environment."""

    process: subprocess.Popen[bytes]
    folder: Path

    def poll(self) -> int | None:
        return self.process.poll()

    def ask_to_stop(self, number: int) -> None:
        """Hand a signal on, once for every time that it was heard: a second SIGINT means to end at once."""
        ask(self.process, signal.SIGUSR1 if number == signal.SIGUSR2 else number)

    def kill(self, pause: Pause) -> None:
        ask(self.process, signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        while left := processes_of(self.folder):
            for process in left:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            if time.monotonic() >= deadline:
                return
            pause(0.05)

    def said(self) -> list[str]:
        """Line about the launcher's own death by a signal: it reports everything else itself."""
        code = self.process.poll()
        return [f"their launcher was killed by {signal.Signals(-code).name}"] if code is not None and code < 0 else []


class LocalBackend:
    """Backend for this machine."""

    where = "local"
    restart = 0

    def __init__(self, run: RunFolder) -> None:
        self.job = f"local-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        self._run = run
        self._locked: int | None = None

    def rival(self, events: Sequence[Event]) -> str:
        """Find another supervisor on this machine, or that of a Slurm job. This one's lock goes with its process."""
        with suppress(OSError):
            self._locked = other_supervisors.lock(self._run)
            if self._locked is None:
                jobs = [event.get("job") for event in events if event["event"] == "begin"]
                return f"another supervisor{f' ({jobs[-1]})' if jobs else ''}"
        return other_supervisors.slurm_rival(self._run, events)

    def standing(self) -> SlurmJob | None:
        return SlurmJob("RUNNING")

    def nodes(self, job: SlurmJob | None) -> list[str]:
        return [node_name()]

    def examine(self, nodes: Sequence[str], folder: Path, full: bool, stopped: Callable[[], bool]) -> dict[str, str]:
        return {}

    def start(self, start: Start, command: Sequence[str]) -> LocalRanks:
        process = subprocess.Popen(
            list(command),
            env=environment(start, {}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches all of the terminal's processes: ranks would hear of it twice
            preexec_fn=prepared(signal.SIGTERM),  # ranks of a supervisor that was killed save and end
        )
        return LocalRanks(process, start.folder)

    def requeue(self) -> str:
        raise NotImplementedError("there is no queue on this machine")

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


def processes_of(attempt: Path) -> list[int]:
    """Processes of this machine that were started for an attempt and are alive (Linux)."""
    mark = f"{ATTEMPT}={attempt}".encode()
    found = []
    with suppress(OSError):
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
