"""Runs the cases of a plan one after another, each in a process of its own, until none is left or fits the time left.

It imports no torch, so that nothing that a GPU does can end it. Killed at any moment it loses the case that runs, no
more: the next start goes on after the rows that are there.
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megalite.base.errors import InputError, counted, printable
from megalite_launch.preflight.smi import SmiError, ask, table
from megalite_tools.bench.training.agreement import judged
from megalite_tools.bench.training.cases import Case, Target
from megalite_tools.bench.training.guard import ProgramEnd, ProgramLimits, end_leftover, run_limited
from megalite_tools.bench.training.junit import counts
from megalite_tools.bench.training.prediction import predicted
from megalite_tools.bench.training.report import can_be_shown
from megalite_tools.bench.training.rows import CRASH, FAILURE, PROGRAM_FAULTS, REFUSAL, Row, Rows, ending, finished

TRIES = 2  # failures in a row after which an implementation is given up
HOST_SHARE = 0.9  # a case may take this share of the host's free memory
FREE_SHARE = 0.02  # a GPU with at most this share of its memory in use counts as free
SETTLING_SECONDS = 10.0  # seconds to wait for memory of a case before to be given back
SMI_SECONDS = 20.0  # a driver may take so long for its first answer
MEMORY_FIELDS = ("memory.used", "memory.total")
ENDING_SECONDS = SETTLING_SECONDS + 12.0  # seconds of a case beyond its limit: before its start, and to be ended
PAUSE = 0.5  # seconds between two looks at it
MODULE = "megalite_tools.bench.training.command"


@dataclass(frozen=True)
class Machine:
    """The machine that cases run on. gpus: their number; None where that does not limit cases, as on a CPU."""

    target: Target
    gpus: int | None

    @staticmethod
    def found(target: Target) -> "Machine":
        if target.device == "cpu":
            return Machine(target, None)
        try:
            found = sum(line.startswith("GPU ") for line in ask(["-L"], SMI_SECONDS).splitlines())
        except SmiError:
            found = 0
        return Machine(target, found or len(list(Path("/dev").glob("nvidia[0-9]*"))))

    def settle(self) -> str:
        """Wait until earlier processes have given memory of GPUs back. Returns a note if they have not, else ""."""
        end = time.monotonic() + SETTLING_SECONDS
        while self.gpus:
            try:
                query = [f"--query-gpu={','.join(MEMORY_FIELDS)}", "--format=csv,noheader,nounits"]
                told = table(ask(query, SETTLING_SECONDS / 2), MEMORY_FIELDS)
                held = max(float(gpu["memory.used"]) - FREE_SHARE * float(gpu["memory.total"]) for gpu in told)
            except (SmiError, ValueError):
                return ""
            if held <= 0:
                return ""
            if time.monotonic() > end - PAUSE:
                return f"{held / 1024:.1f} GiB of a GPU were in use when it started"
            time.sleep(PAUSE)
        return ""


@dataclass
class CaseRunner:
    """Runs cases in a work folder.

    left: seconds that are left, by a clock. say: tells people how a case has ended. begin: called before a case.
    changed: called when a row has changed. started: starts a command and waits for its end. log: a file for the output
    of the case that runs.
    """

    folder: Path
    plan: Path
    machine: Machine
    commit: str
    left: Callable[[], float]
    say: Callable[[str], None]
    begin: Callable[[Case], None] = lambda _: None
    changed: Callable[[Mapping[str, Row]], None] = lambda _: None
    started: Callable[[Sequence[str], Mapping[str, str], ProgramLimits, Path, Path], ProgramEnd] = run_limited
    log: Path | None = None
    again: frozenset[str] = frozenset()
    rows: dict[str, Row] = field(init=False)  # in memory, whatever becomes of the folder
    _files: Rows = field(init=False)

    def __post_init__(self) -> None:
        self._files = Rows(self.folder / "rows")
        self.rows = {}

    def run(self, cases: Sequence[Case]) -> list[str]:
        """Run what is left of a plan. Returns the ids of cases for which there was no time."""
        with locked(self.folder / "lock"):
            self.rows.update(self._files.read(accepts=can_be_shown))
            if end_leftover(self.folder / "running"):
                self.say("ended a case that an earlier start, which was killed, had left running")
            self._changed()
            return [case.id for case in cases if not self._case(case)]

    def _case(self, case: Case) -> bool:
        """Run a case, unless its row is there or says why not. Returns False if it has not come to an end."""
        if case.id not in self.again and self._is_done(case):
            self.say(f"{case.id}: has a row already")
            return True
        if reason := self._refusal(case):
            row = {**self._head(case), "status": REFUSAL, "reason": reason}
            if self.rows.get(case.id, row)["status"] == REFUSAL:
                self._close(case, row)
            else:
                self.say(f"{case.id}: not run again, its earlier row stays: {reason}")
            return True
        if case.limit + ENDING_SECONDS > (left := self.left()):
            wanted = f"its {case.limit:.0f} s and {ENDING_SECONDS:.0f} s to end it"
            self.say(f"{case.id}: not started, as {wanted} do not fit into the {left:.0f} s left")
            return False
        self.begin(case)
        try:
            row = self._measured(case)
        except (OSError, InputError) as error:
            self.say(f"{case.id}: cannot be started: {error}")
            return False
        self._close(case, row)
        return True

    def _is_done(self, case: Case) -> bool:
        row = self.rows.get(case.id, {})
        same = (row.get("commit"), row.get("hash")) == (self.commit, case.hash(self.machine.target))
        return same and row["status"] != REFUSAL

    def _refusal(self, case: Case) -> str:
        """Reason why a case is not worth its time; "" if it is."""
        if self.machine.gpus is not None and case.ranks > self.machine.gpus:
            return f"needs {counted(case.ranks, 'GPU')}, and there are {self.machine.gpus}"
        if not case.implementation:
            return ""
        here = {"label": case.label, "commit": self.commit, "target": asdict(self.machine.target)}
        others = [row for name, row in self.rows.items() if name != case.id and here.items() <= row.items()]
        tried = sorted((row for row in others if row["status"] != REFUSAL), key=lambda row: row["written"])[-TRIES:]
        if len(tried) == TRIES and all(row["status"] in PROGRAM_FAULTS for row in tried):
            return f"{case.label} has failed {TRIES} times in a row: {', '.join(row['id'] for row in tried)}"
        return ""

    def _measured(self, case: Case) -> Row:
        note, limits = self.machine.settle(), ProgramLimits(case.limit, HOST_SHARE * _free_memory())
        self._files.begin(case.id)
        log = self.log or self.folder / "running.log"
        ended = self.started(self._command(case), self._environment(), limits, self.folder / "running", log)
        if case.command:
            status, reason = ending(ended)
            if status == CRASH and ended.code > 0:
                status = FAILURE
            row: Row = {"status": status, "reason": reason, "tail": ended.tail}
            if tests := counts(self.folder / name for name in case.keep if name.endswith(".xml")):
                row["tests"] = tests
        else:
            row = finished(*self._files.found(case.id), ended)
        row = {**({"note": note} if note else {}), **row, **self._head(case)}
        return {**row, "seconds": round(ended.seconds, 1), "host_peak": ended.peak, "written": time.time()}

    def _close(self, case: Case, row: Row) -> None:
        """Take a row, and write it and all rows that it shows in another light."""
        before = dict(self.rows)
        self.rows = judged({**self.rows, case.id: row}) if can_be_shown(row) else self.rows
        for name, each in self.rows.items():
            if each != before.get(name):
                try:
                    self._files.write(name, each)
                except (OSError, InputError) as error:  # a full disk, say: the next case may still tell something
                    self.say(f"{name}: its row cannot be written: {error}")
        self._changed()
        self.say(row_text(self.rows.get(case.id, row)))

    def _changed(self) -> None:
        try:
            self.changed(self.rows)
        except (OSError, InputError) as error:
            self.say(f"results cannot be kept: {error}")

    def _head(self, case: Case) -> Row:
        target = self.machine.target
        head: Row = {"id": case.id, "label": case.label, "commit": self.commit, "hash": case.hash(target)}
        head["target"] = asdict(target)
        head |= {"model": case.model, "implementation": case.implementation, "ranks": case.ranks}
        if case.implementation or case.train:
            head |= {"predicted": predicted(case, target), "group": case.group(target)}
        return head

    def _command(self, case: Case) -> list[str]:
        if case.command:
            words = [word.replace("{folder}", str(self.folder)) for word in case.command]
            return [sys.executable if word == "python" else word for word in words]
        return [
            *(sys.executable, "-m", MODULE, "one", "--case", case.id, "--plan", str(self.plan)),
            *("--out", str(self.folder), "--device", self.machine.target.device),
            *(["--tiny"] if self.machine.target.tiny else []),
        ]

    def _environment(self) -> dict[str, str]:
        """The environment of cases. Interpreted kernels are for rehearsals only."""
        interpreted = "1" if self.machine.target.device == "cpu" else "0"
        # Growing segments leave no gaps in which a tight case would fail; all implementations have them.
        ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
        return {**ours, "PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": interpreted}


def row_text(row: Row) -> str:
    """A measured row as a line for a person."""
    text = f"{row['id']}: {row['status']}"
    if row.get("step_ms"):
        text += f", {row['step_ms']['median']:.1f} ms"
    if row.get("F") is not None:
        text += f", MFU {row['F']:.1%} full, {row['C']:.1%} causal"
    if row.get("reason"):
        text += f" ({row['reason']})"
    return printable(text + (f", after {row['seconds']:.0f} s" if "seconds" in row else ""))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a folder's lock. Raises InputError where another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(f"{path.parent}: another process runs cases there; wait, or give another folder") from None
    finally:
        os.close(file)


def _free_memory() -> float:
    """Bytes of the host's memory that can be had."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024.0
    return float("inf")
