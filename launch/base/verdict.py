"""Verdict on an attempt: how it has ended, and which rank of which node was the first to fail.

srun returns the highest exit code of all ranks, and those that it has ended itself have one too. So what ranks have
written counts first (`outcome`), then what srun says of single tasks, and the exit code only if there is nothing else.
Where a disk is full, ranks could write nothing and end with any code: then that is the cause, unless a signal was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .outcome import BAD_INPUT, DONE, FAILED, INTERRUPTED, LOST_CONTACT, STOPPED, UNHEALTHY, Failure, Outcome

FINISH, STOP, INPUT_ERROR, HEALTH_FAILURE, CRASH = "finished", "stopped", "bad_input", "unhealthy", "crash"
CONTACT_LOSS, HANG, KILL, TIMEOUT = "lost_contact", "hang", "killed", "timeout"
RETRIED_CAUSES = (CRASH, CONTACT_LOSS, HANG, KILL)  # after which it is worth trying again
CAUSES = {
    DONE: FINISH,
    STOPPED: STOP,
    BAD_INPUT: INPUT_ERROR,
    UNHEALTHY: HEALTH_FAILURE,
    LOST_CONTACT: CONTACT_LOSS,
    INTERRUPTED: STOP,
}
TASKS = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
SRUN_ERROR = re.compile(  # an error of srun itself, as while Slurm's controller restarts, and of no node
    r"srun: (?:error|fatal): (?P<why>.*(?:controller|configuration source|Socket timed out|Zero Bytes|temporarily"
    r"|Connection (?:refused|reset|timed out)|Communication connection|[Mm]unge|authentication|Unknown host"
    r"|Unable to create step(?!.*(?:not available \(|node configuration|than permitted|already|nvalid|xpired))).*)"
)
NODE_ERROR = re.compile(r"on node|launch failed|Node failure")  # in errors of srun about nodes, which may time out too
TRACEBACK = "Traceback (most recent call last)"
STEP_END_MARKS = ("_step_signal: Terminating", "Job step aborted", "Force Terminated", "*** STEP", "*** JOB")


@dataclass(frozen=True)
class First:
    """The first rank or node to fail."""

    rank: int | None
    node: str | None
    text: str

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        who = " on ".join(part for part in (rank, self.node) if part)
        return ": ".join(part for part in (who, self.summary) if part)

    @property
    def summary(self) -> str:
        """The last line of a traceback, which is the error; of other texts the first two, as a table may follow."""
        lines = [line.strip() for line in self.text.strip().splitlines()] or [""]
        return lines[-1] if any(TRACEBACK in line for line in lines) else "; ".join(lines[:2])


@dataclass(frozen=True)
class Seen:
    """Observations of an attempt that is over."""

    nodes: Sequence[str]
    ranks_per_node: int
    code: int  # exit code of srun or of the launcher; negative: killed by that signal
    failures: Sequence[Failure] = ()
    outcome: Outcome | None = None
    said: Sequence[str] = ()  # lines that srun has printed
    reaped: str = ""  # why it was killed by the supervisor
    silent: bool = False  # it was killed because nothing moved
    dumps: bool = False  # ranks have dumped their flight recorders, as they do when nothing moves
    out_of_time: bool = False  # Slurm says that the time limit of the job is over
    asked: bool = False  # the supervisor was asked to stop
    full: str = ""  # which file system that the run writes to is full
    met: bool = True  # rank 0 has noted that all ranks have met


@dataclass(frozen=True)
class Ended:
    """The verdict on an attempt."""

    cause: str
    code: int  # exit code, one of those in docs/exit_codes.md
    first: First | None = None
    asked: bool = False  # to stop, by a signal to the supervisor
    steps: tuple[int, int] = (0, 0)  # steps of the newest checkpoints before and after the attempt
    seconds: float = field(default=0.0, compare=False)
    met: bool = field(default=True, compare=False)  # all ranks have met

    @property
    def saved(self) -> str:
        """Text that names the saved step from which training can go on, or says that there is none."""
        return f"step {self.steps[1]} is saved" if self.steps[1] else "nothing was saved yet"


def judge(seen: Seen) -> Ended:
    """Return the verdict. The module's text says which evidence counts first."""
    met = seen.met or any(failure.step for failure in seen.failures) or bool(seen.outcome and seen.outcome.step)
    return replace(_judged(seen), met=met)


def srun_failed(said: Sequence[str]) -> str:
    """The error of srun itself, which has started nothing; empty if there is none, or it tells of tasks and nodes."""
    if any(TASKS.search(line) or NODE_ERROR.search(line) for line in said):
        return ""
    return next((found["why"] for line in said if (found := SRUN_ERROR.search(line))), "")


def _judged(seen: Seen) -> Ended:
    if seen.outcome is not None and not _belied(seen, seen.outcome):
        return Ended(CAUSES.get(seen.outcome.code, CRASH), seen.outcome.code)
    if seen.out_of_time:
        return Ended(TIMEOUT, STOPPED, _first_said(seen))
    told = seen.failures[0] if seen.failures else None
    if told is not None and not told.follows:
        return _found(seen, told.code, First(told.rank, told.node or None, told.text))
    killed = _first_said(seen)
    if killed is not None and not (told is not None and _code(killed.text) == LOST_CONTACT):
        return _found(seen, _code(killed.text), killed)
    if told is not None:
        hangs = seen.dumps or seen.silent
        return Ended(HANG if hangs else CONTACT_LOSS, LOST_CONTACT, _who(seen, told))
    if seen.silent and seen.full:
        return Ended(HEALTH_FAILURE, UNHEALTHY, First(None, None, seen.full))
    if seen.silent:
        return Ended(HANG, LOST_CONTACT, _missing(seen))
    if seen.reaped:
        return Ended(KILL, LOST_CONTACT, _missing(seen))
    if not seen.met and not seen.full and (why := srun_failed(seen.said)):
        return Ended(CONTACT_LOSS, LOST_CONTACT, First(None, None, why))
    return _found(seen, seen.code, None)


def _found(seen: Seen, code: int, first: First | None) -> Ended:
    """The verdict by the exit code of the first to fail."""
    cause, meant = _meaning(code)
    if cause == STOP and first is None and code == STOPPED and not seen.asked and not seen.full:
        return Ended(cause, meant, First(None, None, "its exit code says so, and no rank has told it"))
    if not seen.full or cause in (FINISH, KILL) or (cause == STOP and (seen.asked or code == INTERRUPTED)):
        return Ended(cause, meant, first)
    said = f"{seen.full} ({first.summary})" if first and first.summary else seen.full
    return Ended(HEALTH_FAILURE, UNHEALTHY, First(first.rank if first else None, first.node if first else None, said))


def _belied(seen: Seen, outcome: Outcome) -> bool:
    """Return whether ranks stopped only because another had failed or was killed: srun ends the rest with SIGTERM."""
    if outcome.code == DONE:
        return False
    said = _first_said(seen)
    # A rank that has stopped may die of a request that comes while it ends, when it listens no longer.
    requests = ("Terminated", "User defined signal") if seen.asked else ("Terminated",)
    killed = said is not None and _code(said.text) < 0 and not said.text.startswith(requests)
    return killed or any(failure.time < outcome.time for failure in seen.failures)


def _meaning(code: int) -> tuple[str, int]:
    """The cause that an exit code stands for, and the exit code that the job gets for it."""
    if code < 0 or (code > 128 and code != INTERRUPTED):
        return KILL, LOST_CONTACT
    return (CAUSES[code], code) if code in CAUSES else (CRASH, FAILED)


def _code(text: str) -> int:
    """The exit code of a task by what srun says of it: a word for a signal, else the code."""
    found = re.search(r"exit code (\d+)", text)
    return int(found[1]) if found else -1


def _first_said(seen: Seen) -> First | None:
    """The task that ended the others, by what srun says of single tasks.

    Among tasks that srun names before it begins to end the others itself, one that a signal has killed counts before
    one that has ended by itself, as the latter may only have missed the former. A task that was lost in between is
    known by being the only one that was killed and not terminated.
    """
    before: list[First] = []
    after: list[First] = []
    ending = False
    for line in seen.said:
        if node := NODE_FAILURE.search(line):
            return First(None, node[1], f"Node failure on {node[1]}")
        ending = ending or any(sign in line for sign in STEP_END_MARKS)
        if tasks := TASKS.search(line):
            (after if ending else before).append(First(_ranks(tasks[2])[0], tasks[1], tasks[3]))
    killed = [first for first in before if _code(first.text) < 0]
    lost = [first for first in after if _code(first.text) < 0 and not first.text.startswith("Terminated")]
    alone = (
        lost
        if len(lost) == 1 and not seen.reaped and all(_code(first.text) == LOST_CONTACT for first in before)
        else []
    )
    return next(iter([*killed, *alone, *before]), None)


def _who(seen: Seen, told: Failure) -> First:
    """Find the rank that was missed, when ranks report only that they have missed another."""
    if seen.reaped and (missing := _missing(seen)):
        return First(missing.rank, missing.node, told.text or missing.text)
    return First(told.rank, None, told.text)  # the one that tells has done nothing wrong


def _missing(seen: Seen) -> First | None:
    """The one node whose ranks have neither told anything nor ended, if there is just one."""
    heard = {failure.rank for failure in seen.failures}
    for line in seen.said:
        if tasks := TASKS.search(line):
            heard.update(_ranks(tasks[2]))
    count = len(seen.nodes) * seen.ranks_per_node
    missing = [rank for rank in range(count) if rank not in heard]
    nodes = {seen.nodes[rank // seen.ranks_per_node] for rank in missing}
    if len(nodes) != 1 or len(seen.nodes) == 1:
        return None
    return First(missing[0] if len(missing) == 1 else None, nodes.pop(), "gave no sign of life")


def _ranks(text: str) -> list[int]:
    """The numbers in a list such as 0-2,5."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            ranks.extend(range(int(first), min(int(last or first), int(first) + 100_000) + 1))
    return ranks or [0]
