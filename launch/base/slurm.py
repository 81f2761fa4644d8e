"""Slurm's commands, as the supervisor and the guard use them.

Everything is passed as a list of arguments, never through a shell. Slurm's answers are checked before they are used.
A controller may be busy or restarting: no answer is an answer of its own, and `patiently` asks again.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .errors import UserError

ANSWER_SECONDS = 30.0  # seconds that a command may take
JOB = re.compile(r"\d{1,10}(_\d{1,7})?")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
# Lines of `scontrol show job`, which begin like this. The name of the job, which users choose, is on another one.
STATE = re.compile(r"^   JobState=([A-Z_]+) Reason=(\S+)", re.MULTILINE)
COUNTS = re.compile(r"^   Requeue=([01]) Restarts=(\d+)", re.MULTILINE)
NODES = re.compile(r"^   NodeList=(\S*)", re.MULTILINE)
UNKNOWN_JOB_ERROR = "Invalid job id"
UNFIT_STATES = ("drain", "down", "fail")  # how states of nodes begin on which nothing new should be started

T = TypeVar("T")


class Answer(NamedTuple):
    """Answer of a command. The code is 124 if it took too long, and 127 if it could not be run."""

    code: int
    out: str
    error: str


Call = Callable[[Sequence[str]], Answer]
# Slurm shows SIGNALING in place of RUNNING until every node has passed a signal on, whichever it is, and RESIZING until
# nodes have joined or left. A job that is cancelled is COMPLETING.
RUNNING_STATES = ("RUNNING", "SIGNALING", "RESIZING")


@dataclass(frozen=True)
class SlurmJob:
    """A job, as Slurm sees it."""

    state: str  # such as RUNNING; GONE: Slurm does not know it any more
    reason: str = "None"
    may_requeue: bool = False
    restarts: int = 0
    nodes: str = ""  # as Slurm writes lists: n[1-2]

    def goes_on(self, restart: int) -> bool:
        """Return whether this start of the job may go on: neither cancelled nor requeued, and not out of time."""
        return self.runs and self.restarts == restart

    @property
    def runs(self) -> bool:
        """Return whether the job has its nodes and is not suspended."""
        return self.state in RUNNING_STATES


def call(command: Sequence[str]) -> Answer:
    """Run a command of Slurm."""
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{command[0]} gave no answer within {ANSWER_SECONDS:.0f} s")
    except OSError as error:
        return Answer(127, "", f"{command[0]} cannot be run: {error.strerror}")
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace").strip())


class Slurm:
    """Asks and commands Slurm about one job. Raises UserError for what is no job's number."""

    def __init__(self, job: str, call: Call = call) -> None:
        if not JOB.fullmatch(job):
            raise UserError(f"SLURM_JOB_ID = {job!r}: must be the number of a job")
        self.number, self._call = job, call

    def job(self, number: str | None = None) -> SlurmJob | None:
        """Ask Slurm for this job or another; None if Slurm gave no answer that can be understood."""
        answer = self._call(["scontrol", "show", "job", number or self.number])
        if answer.code:
            return SlurmJob("GONE") if UNKNOWN_JOB_ERROR in answer.error else None
        state, counts, nodes = (pattern.search(answer.out) for pattern in (STATE, COUNTS, NODES))
        if not state or not counts:
            return None
        listed = nodes[1] if nodes and nodes[1] != "(null)" else ""
        return SlurmJob(state[1], state[2], counts[1] == "1", int(counts[2]), listed)

    def names(self, nodes: str) -> list[str]:
        """The names in a list of nodes, in Slurm's order; none if there is no such answer."""
        answer = self._call(["scontrol", "show", "hostnames", nodes]) if nodes else Answer(1, "", "")
        names = answer.out.split()
        return names if answer.code == 0 and all(NODE.fullmatch(name) for name in names) else []

    def unfit(self, nodes: Sequence[str]) -> dict[str, str]:
        """Nodes on which nothing new should be started (drained, down or failing), each with the reason; none if Slurm
        does not answer."""
        answer = self._call(["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N|%T|%E"])
        rows = [line.strip().split("|", 2) for line in answer.out.splitlines()] if answer.code == 0 else []
        return {row[0]: f"{row[1]}: {row[2]}" for row in rows if len(row) == 3 and row[1].startswith(UNFIT_STATES)}

    def requeue(self) -> str:
        """Ask Slurm to put the job back into its queue. Returns why it refused; empty if it did not."""
        answer = self._call(["scontrol", "requeue", self.number])
        return (answer.error or f"scontrol ended with {answer.code}") if answer.code else ""

    def steps(self) -> dict[str, str] | None:
        """Number and name of the steps under way, but for those without a number (batch, extern); None: no answer."""
        answer = self._call(["squeue", "--noheader", "--steps", "--jobs", self.number, "--format", "%i %j"])
        if answer.code:
            return None
        found = (re.fullmatch(r"[\d_]+\.(\d+)(?: (.*))?", line.strip()) for line in answer.out.splitlines())
        return {step[1]: step[2] or "" for step in found if step}

    def kill(self, step: str) -> None:
        """Have a step killed on all of its nodes, also one whose srun is gone. Does not wait: a node may be frozen."""
        command = ["scancel", "--signal=KILL", f"{self.number}.{step}"]
        threading.Thread(target=self._call, args=(command,), name=f"kill {step}", daemon=True).start()


def patiently(ask: Callable[[], T | None], pause: Callable[[float], object], patience: float) -> T | None:
    """Call `ask` again and again, with growing pauses, until its answer is not None; return the answer.

    patience: seconds of pauses in all, after which the answer is None.
    """
    wait, waited = 1.0, 0.0
    while (answer := ask()) is None and waited < patience:
        pause(wait)
        waited += wait
        wait = min(2 * wait, 30.0, max(1.0, patience - waited))
    return answer
