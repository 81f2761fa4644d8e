"""A run as its folder shows it, read again and again: only what has come since is read."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ..base.errors import UserError
from ..base.events import MAX_TEXT_LENGTH, Event
from ..base.files import read_bytes
from ..base.line_files import Tail, number, parsed, whole
from ..base.run_folder import CHECKPOINT, Attempt, RunFolder
from ..base.texts import printable
from ..base.verdict import RETRIED_CAUSES
from .failures import interruptions
from .ledger import SECOND, Ledger

MIN_TIME = 946_684_800 * SECOND  # the year 2000: a clock that says less has not been set
MAX_CLOCK_LEAD = 60 * SECOND  # lead of a node's clock over ours; a time that is later still is not believed
MAX_DECISIONS = 50  # latest ones that are kept
MAX_NODES = 10_000  # nodes that are remembered
MAX_SAVES = 20  # latest saves whose times are kept
MAX_RETURNS = 100  # latest returns to an earlier step that are kept
REPORTED_EVENTS = (  # events of training that people are told
    "rollback", "save_failed", "save_local_failed", "local_off", "save_problem", "not_served", "bad_step", "spike",
)  # fmt: skip
MAX_RECORD_BYTES = 2**20  # bytes of a record of a start


@dataclass
class Node:
    """Complaints about a node."""

    first: int = 0  # how often it was the first to fail
    slow: int = 0  # how often it was told to be a straggler
    bad: str = ""  # why preflight refused it
    left_out: str = ""  # why it is not used

    @property
    def heat(self) -> tuple[bool, int, int]:
        return bool(self.left_out or self.bad), self.first, self.slow


@dataclass
class Saves:
    """The checkpoints of a run, as in its reports. Times are seconds."""

    step: Optional[int] = None  # step of the newest complete checkpoint
    time: float = 0.0
    bytes: float = 0.0
    under_way: Optional[int] = None
    blocked: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAVES))
    written: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAVES))


class Watched:
    """State of a run, read from its folder. Call `update`, and then look."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self._forget()

    def _forget(self) -> None:
        self._events, self._metrics = Tail(self.folder.events), Tail(self.folder.metrics)
        self.ledger, self.saves = Ledger(), Saves()
        self.nodes: dict[str, Node] = {}
        self.decisions: deque[tuple[float, str, str]] = deque(maxlen=MAX_DECISIONS)
        self.supervised = False  # whether there are events of a supervisor
        self._begun: dict[str, set[str]] = {}  # jobs that have not told their end, and others that were heard since
        self.over: Optional[tuple[int, str]] = None  # code and reason of the end
        self.ended: str = ""  # how training says that it has ended: "done", "stopped" or "failed"
        self.reason = ""
        self.loss = self.tokens_per_second = self.step_seconds = 0.0
        self.report_steps = 1  # between two records
        self.valid: list[tuple[int, float]] = []  # step and loss of evaluations
        self.returns: deque[tuple[int, str]] = deque(maxlen=MAX_RETURNS)  # step to which training went back, and why
        self._attempts: list[Event] = []  # events by which failures are counted
        self._latest = 0
        self._before = {"events": 0, "metrics": 0}  # the latest time that was read of each file
        self._newest_start = -1
        self.steps: Optional[int] = None  # steps that the latest start is to make
        self.ranks: Optional[int] = None

    def update(self, now: Optional[float] = None) -> None:
        """Read what has come. now: seconds since 1970; no time is taken to be later."""
        if self._events.replaced() or self._metrics.replaced():
            self._forget()
        self.now = time.time() if now is None else now
        self._latest = int(self.now * SECOND)
        events = self._in_order()
        waiting = next(events, None)
        metric = self._metric
        for line in self._metrics.lines():
            found = parsed(line)
            moment = self._moment(found, "metrics") if found is not None else None
            if found is None or moment is None:
                continue
            while waiting is not None and waiting[0] <= moment:
                self._event(*waiting)
                waiting = next(events, None)
            metric(moment, found)
        while waiting is not None:
            self._event(*waiting)
            waiting = next(events, None)
        self._look_at_starts()

    def _in_order(self) -> Iterator[tuple[int, Event]]:
        """New events; their writers' clocks may differ, so the order is that of the file."""
        latest = 0
        for line in self._events.lines():
            found = parsed(line)
            moment = self._moment(found, "events") if found is not None else None
            if found is not None and moment is not None and isinstance(found.get("event"), str):
                latest = max(latest, moment)
                yield latest, found

    def _moment(self, line: dict[str, Any], file: str) -> Optional[int]:
        """Time of a line in µs; None if it has none. A time in the future counts as that of the line before it."""
        seconds = number(line.get("time"))
        moment = None if seconds is None else int(seconds * SECOND)
        if moment is not None and moment > self._latest:
            moment = self._latest if moment <= self._latest + MAX_CLOCK_LEAD else self._before[file]
        if moment is None or moment < MIN_TIME:
            return None
        self._before[file] = max(self._before[file], moment)
        return moment

    # events.jsonl

    def _event(self, at: int, event: Event) -> None:
        kind, ledger, job = event["event"], self.ledger, str(event.get("job"))
        self.supervised = True
        if job in self._begun and kind != "begin":  # a sign of life, which a job that was killed does not give
            for other, alive in self._begun.items():
                if other != job:
                    alive.add(job)
        if kind == "submitted":
            ledger.submitted(at)
            self.over = None
        elif kind == "begin":
            ledger.job_began(at)
            self._begun[job] = set()
            self.over = None
        elif kind == "attempt" and Attempt.parse(str(event.get("attempt"))) is not None:
            nodes = event.get("nodes")
            names = [printable(node, 64) for node in nodes[:MAX_NODES]] if isinstance(nodes, list) else []
            ranks, step = whole(event.get("ranks")) or 0, whole(event.get("step"))
            ledger.attempt_began(at, printable(event.get("attempt"), 64), names, ranks, step)
            self._attempts.append({"event": kind, "time": at / SECOND, "ranks": ranks})
            self.over = None
        elif kind == "attempt_ended":
            self._attempt_ended(at, event)
        elif kind == "requeue":
            self._begun.pop(job, None)
            ledger.job_ended(at)
        elif kind == "end" and self._begun.pop(job, set()) & self._begun.keys():
            ledger.at(at)  # another job is at work, which was there before: this one has done nothing
        elif kind == "end":
            ledger.job_ended(at)
            code = event.get("code")
            self.over = (code if type(code) is int else 1, printable(event.get("reason") or event.get("text") or ""))
        else:
            ledger.at(at)
        self._note_nodes(kind, event)
        self.decisions.append((at / SECOND, printable(event.get("by") or "", 40), printable(event.get("text") or kind)))

    def _attempt_ended(self, at: int, event: Event) -> None:
        first = event.get("first")
        kept: Optional[dict[str, Any]] = None
        if isinstance(first, dict):
            kept = {
                "rank": whole(first.get("rank")),
                "node": printable(first.get("node") or "", 64),
                "text": str(first.get("text") or "")[:MAX_TEXT_LENGTH],
            }
        cause, code = printable(event.get("cause"), 40), event.get("code")
        step = whole(event.get("to_step"))
        self.ledger.attempt_ended(at, cause, code if type(code) is int else None, kept, step)
        self._attempts.append({"event": "attempt_ended", "time": at / SECOND, "cause": cause})
        if kept is not None and kept["node"] and cause in RETRIED_CAUSES and not event.get("asked"):
            self._node(kept["node"]).first += 1

    def _note_nodes(self, kind: str, event: Event) -> None:
        name, reason = event.get("node"), printable(event.get("reason") or event.get("text") or "no reason given", 200)
        if kind == "left_out" and isinstance(name, str):
            self._node(printable(name, 64)).left_out = reason
        elif kind == "straggler" and isinstance(name, str):
            self._node(printable(name, 64)).slow += 1
        elif kind == "preflight":
            bad, ok = event.get("bad"), event.get("ok")
            for node in ok if isinstance(ok, list) else []:
                if isinstance(node, str) and printable(node, 64) in self.nodes:
                    self._node(printable(node, 64)).bad = ""
            for refused, why in bad.items() if isinstance(bad, dict) else []:
                self._node(printable(refused, 64)).bad = printable(why, 200) or "refused"

    def _node(self, name: str) -> Node:
        if name not in self.nodes and len(self.nodes) >= MAX_NODES:
            return Node()
        return self.nodes.setdefault(name, Node())

    # metrics.jsonl

    def _metric(self, at: int, line: dict[str, Any]) -> None:
        step = line.get("step")
        if type(step) is not int or not 0 <= step < 10**15:
            return
        seconds = line.get("step_seconds")
        if type(seconds) is float and 0 < seconds < 1e9:
            loss = number(line.get("loss"))
            self.report_steps = max(step - self.ledger.step, 1)
            self.loss = float("nan") if loss is None else loss
            self.step_seconds = seconds
            self.tokens_per_second = number(line.get("tokens_per_second")) or 0.0
            self.ledger.record(at, step, int(seconds * SECOND), self.loss, seconds)
            self.ended = ""
        elif "event" in line:
            self._told(at, step, line)
        elif "valid_loss" in line:
            self.ledger.evaluated(at, step)
            loss = number(line["valid_loss"])
            if loss is not None:
                self.valid.append((step, loss))

    def _told(self, at: int, step: int, line: dict[str, Any]) -> None:
        kind, ledger, saves = line["event"], self.ledger, self.saves
        checkpoint = whole(line.get("checkpoint"))
        if kind in ("resumed", "rollback"):
            self.valid = [point for point in self.valid if point[0] <= step]
            self.returns.append((step, "resumed" if kind == "resumed" else "rolled back"))
        if kind == "resumed":
            ledger.resumed(at, step)
            saves.under_way, self.ended = None, ""
        elif kind == "rollback":
            ledger.rolled_back(at, step)
        elif kind in ("saving", "saving_local") and checkpoint is not None:
            blocked = min(max(number(line.get("blocked")) or 0.0, 0.0), 1e7)
            ledger.saved(at, checkpoint, int(blocked * SECOND))
            if kind == "saving":  # else to the nodes alone, of which the run folder tells nothing
                saves.blocked.append(blocked)
                saves.under_way = checkpoint
        elif kind == "saved" and checkpoint is not None:
            ledger.at(at)
            saves.step, saves.time, saves.bytes = checkpoint, at / SECOND, number(line.get("bytes")) or 0.0
            saves.written.append(max(number(line.get("seconds")) or 0.0, 0.0))
        elif kind in ("done", "stopped", "failed"):
            ledger.training_ended(at, step, kind != "failed")
            if kind == "done" and ledger.parts and ledger.parts[-1].cause == "stopped":
                ledger.parts[-1].cause = "finished"
            self.ended, self.reason = str(kind), printable(line.get("reason") or "")
            saves.under_way = None
        else:
            ledger.at(at)
        if kind in ("saved", "save_failed") and saves.under_way == checkpoint:
            saves.under_way = None
        if kind in REPORTED_EVENTS:
            answer = f": {printable(line['answer'], 20)}" if isinstance(line.get("answer"), str) else ""
            self.decisions.append((at / SECOND, "training", f"{kind.replace('_', ' ')} at step {step:,}{answer}"))

    # Other files

    def _look_at_starts(self) -> None:
        """Read the number of steps that the latest start is to make, and its number of ranks."""
        try:
            found = sorted(
                path for path in (self.folder.path / "starts").iterdir() if re.fullmatch(r"\d+\.json", path.name)
            )
        except OSError:
            found = []
        if len(found) == self._newest_start:
            return
        self._newest_start = len(found)
        for path in found[-1:]:
            try:
                record = json.loads(read_bytes(path, MAX_RECORD_BYTES))
            except (OSError, ValueError, RecursionError):
                self._newest_start = -1  # it may be half written
                continue
            if isinstance(record, dict):
                self.steps, self.ranks = whole(record.get("steps")), whole(record.get("ranks"))

    def newest_checkpoint(self) -> Optional[int]:
        """The step of the newest checkpoint, as its reports and its folder tell; None if there is none."""
        return max(filter(None, (self.saves.step, self.folder.newest_step())), default=None)

    def partial(self) -> Optional[int]:
        """The step of a checkpoint that is being written."""
        try:
            names = [path.name for path in self.folder.checkpoints.iterdir() if ".partial." in path.name]
        except OSError:
            return None
        found = [CHECKPOINT.match(name) for name in names]
        return max((int(name[1]) for name in found if name), default=None)

    def interruptions(self, end: float) -> tuple[int, float]:
        """Number of failed attempts, and hours that ranks have run in all. end: the end of an attempt that goes on."""
        return interruptions(self._attempts, end)


def open_run(path: str) -> Watched:
    """Open the run in a folder. Raises UserError for what is no run folder."""
    run = Watched(Path(path))
    folder = run.folder
    if not any(found.exists() for found in (folder.events, folder.metrics, folder.attempts, folder.path / "starts")):
        found = "has no events.jsonl and no metrics.jsonl" if folder.path.is_dir() else "is no folder"
        raise UserError(
            f"{printable(path)}: {found}; give the folder of a run, which is run.dir/run.name, such as runs/small"
        )
    return run
