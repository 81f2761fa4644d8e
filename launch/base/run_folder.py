"""Places and names of the files about a run's starts in its run folder.

A run is started by jobs. Slurm may restart a job, and within one start of a job the supervisor may start the ranks
several times: these are its attempts. An attempt is named JOB.RESTART.NUMBER, as in `4711.0.2`.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError
from .files import foreign, opened
from .line_files import parsed, whole

ATTEMPT = "MEGALITE_ATTEMPT"  # environment of ranks: the absolute path of the folder of their attempt
NODE = "MEGALITE_NODE"  # environment of pods: the name of the node on which they are
START_BYTES = 2**20  # bytes of reports in which ranks say from where they go on
CHECKPOINT = re.compile(r"step-(\d{1,15})")
NAME = re.compile(r"(?P<job>[A-Za-z0-9_-]+)\.(?P<restart>\d{1,9})\.(?P<number>\d{1,9})")


def node_name() -> str:
    """The name of this node: that of Kubernetes or Slurm, as the host may have another; else the host's, shortened."""
    return os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def log_name(node: str, rank: int) -> str:
    """The name of a rank's log in the folder of an attempt; srun makes the same of `%N-%t.log`."""
    return f"{node}-{rank}.log"


@dataclass(frozen=True, order=True)
class Attempt:
    """The name of an attempt."""

    job: str  # Slurm's id of the job, or `local-TIME`
    restart: int  # how often Slurm has restarted the job
    number: int  # attempts before this one, in this start of the job

    def __str__(self) -> str:
        return f"{self.job}.{self.restart}.{self.number}"

    @staticmethod
    def parse(name: str) -> Attempt | None:
        """The attempt of this name; None if it is no such name."""
        found = NAME.fullmatch(name)
        return found and Attempt(found["job"], int(found["restart"]), int(found["number"]))


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files in a run's folder by which the launcher, the supervisor and the ranks inform each other."""

    path: Path

    def check(self) -> None:
        """Raises UserError for what leads elsewhere, so that other files would be written: see `files`."""
        own = [self.path / name for name in ("events.jsonl", "attempts", "logs", "launch")]
        own += (self.path / "logs").glob("slurm-*")  # which Slurm itself opens, by the number of the job
        if found := [f"{path}: {told}" for path in own if (told := foreign(path))]:
            raise UserError("\n  ".join(["the run folder is not safe to write to", *found]))

    @property
    def events(self) -> Path:
        """Decisions about the run, a line of JSON each; see `events`."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """File in which training reports its metrics; see docs/metrics.md."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, attempt: Attempt) -> Path:
        """The folder in which ranks say how they have ended; see `outcome`."""
        return self.attempts / str(attempt)

    def logs(self, attempt: Attempt) -> Path:
        """The folder of what ranks have printed; see `log_name`."""
        return self.path / "logs" / str(attempt)

    def reported(self) -> int:
        """Bytes that training has reported so far."""
        try:
            return self.metrics.stat().st_size
        except OSError:
            return 0

    def resumed_step(self, since: int) -> int | None:
        """The step from which ranks say to go on, in what was reported after `since` bytes; None if they do not.

        If the newest checkpoint was damaged, this is the step of an older one.
        """
        with suppress(OSError), open(opened(self.metrics, os.O_RDONLY), "rb") as file:
            file.seek(since)
            found = (parsed(line) for line in file.read(START_BYTES).split(b"\n"))
            steps = [event.get("step") for event in found if event is not None and event.get("event") == "resumed"]
            return whole(steps[0]) if steps else None
        return None

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        try:
            found = [CHECKPOINT.fullmatch(path.name) for path in self.checkpoints.iterdir()]
        except OSError:
            return 0
        return max((int(name[1]) for name in found if name), default=0)
