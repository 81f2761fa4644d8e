"""The supervisor's story, top to bottom: look at the nodes, start the ranks, see how they end, and go on or end.

`policy` decides on the next step, `verdict` on how an attempt has ended, and a backend carries it out. Every decision
is an event of the run folder, and a line on stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..base.events import Event, append_event, read_events
from ..base.files import opened
from ..base.free_space import no_room
from ..base.outcome import BAD_INPUT, FAILED, STOPPED, UNHEALTHY, have_met, read_failures, read_outcome
from ..base.run_folder import Attempt, RunFolder
from ..base.slurm import SlurmJob, patiently
from ..base.texts import counted, escaped
from ..base.verdict import CONTACT_LOSS, HANG, RETRIED_CAUSES, Ended, First, Seen, judge
from ..status import page
from . import policy
from .backend import Backend, Running, Start
from .frozen_configuration import Frozen
from .policy import END, NODE_SHORTAGE, REQUEUE, WRITE_FAILURE, Move, Past, Patience, RestartLimits, Wants

POLL_SECONDS = 0.1  # seconds between two looks whether the ranks have ended
POLLS_PER_READ = 5  # polls between two looks at the files


class SystemClock:
    """The time, which tests replace."""

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class Check:
    """Answer of a check of the configuration for a number of ranks."""

    code: int
    text: str = ""

    @property
    def refuses(self) -> bool:
        """Flag: the configuration is bad. Other failures, as of a file system for a moment, are left to the ranks."""
        return self.code == BAD_INPUT


class Supervisor:
    """Looks after the ranks of one start of a job, or of one call on this machine."""

    def __init__(
        self,
        run: RunFolder,
        command: Sequence[str],
        backend: Backend,
        wants: Wants,
        limits: RestartLimits,
        check: Callable[[int], Check] = lambda ranks: Check(0),
        clock: SystemClock | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        self.run_folder, self.command, self.backend, self.limits = run, list(command), backend, limits
        self.wants, self.clock, self._check = wants, clock or SystemClock(), check
        self.asked: list[int] = []  # signals that were heard
        self.frozen = frozen
        self.events: list[Event] = []
        self._number, self._told_left_out = 0, set[str]()
        self._checks: dict[int, Check] = {}
        self._made: Path | None = None  # the folder of the latest attempt, which nobody else removes
        self._lost = ""  # fate of the run folder, once it is not the one any more that the run began in
        self._suspicious = True  # flag: the hardware is suspected, so the next preflight is a full one

    def hear(self, number: int, frame: object = None) -> None:
        """A handler of signals: each asks to save and to stop."""
        self.asked.append(number)

    def run(self) -> int:
        """Returns the exit code."""
        self.events = self._remembered()
        if rival := self.backend.rival(self.events):
            text = f"{rival} is at work in this run folder; stop that one, or give run.name another name"
            self.note("refused", text, code=BAD_INPUT)
            return BAD_INPUT
        try:
            return self._go_on()
        except Exception as error:
            reason = f"the supervisor has failed: {type(error).__name__}: {error}"
            self.note("end", f"ends with exit code {FAILED}: {reason}", code=FAILED, reason=reason)
            raise
        finally:
            if self.frozen is not None:
                self.frozen.end()
            self.backend.end()
            self._show(at_once=True)

    def note(self, event: str, text: str, **details: Any) -> None:
        """Write a decision down and say it. A full disk changes no decision, and a folder that is gone stays so."""
        details = {"job": self.backend.job, "restart": self.backend.restart, **details}
        found = {"time": time.time(), "event": event, "by": "supervisor", **details, "text": text}
        try:
            if not self._lost:
                found = append_event(self.run_folder.events, event, "supervisor", text, **details)
        except OSError as error:
            text += f" ({self.run_folder.events} cannot be written: {error.strerror})"
        self.events.append(found)
        with suppress(OSError, ValueError):
            print(f"megalite supervisor: {escaped(text)}", file=sys.stderr, flush=True)

    def _show(self, at_once: bool = False) -> None:
        """Bring the page of the run up to date."""
        with suppress(Exception):  # whatever is wrong with a page, ranks are looked after
            if not self._lost:
                page.write(self.run_folder.path, at_once=at_once)

    def _remembered(self) -> list[Event]:
        try:
            return read_events(self.run_folder.events)
        except OSError:
            return []

    def _before_this(self) -> list[Event]:
        """Events before this start of the job, by the order of the file, which all see alike."""
        events, mine = self._remembered(), ("begin", self.backend.job)
        begun = [at for at, event in enumerate(events) if (event["event"], event.get("job")) == mine]
        return events[: begun[-1]] if begun else []

    def _go_on(self) -> int:
        job = self._standing()
        nodes = self.backend.nodes(job)
        self.wants = self.wants.of(len(nodes))
        step = self.run_folder.newest_step()
        spares = max(0, len(nodes) - self.wants.nodes)
        told = f"begins at step {step} on {counted(len(nodes), 'node')}{f', {spares} to spare' if spares else ''}"
        where = {"backend": self.backend.where, "cluster": os.environ.get("SLURM_CLUSTER_NAME", "")}
        self.note("begin", told, nodes=nodes, spares=spares, step=step, **where)
        if self.backend.where == "slurm" and (rival := self.backend.rival(self._before_this())):
            reason = f"{rival} has begun in this run folder at the same moment, and goes on"
            self.note("end", f"ends with exit code {BAD_INPUT}: {reason}", code=BAD_INPUT, reason=reason)
            return BAD_INPUT
        while True:
            move = self._one(nodes)
            if move.kind == REQUEUE:
                why = self._requeue(move)
                if not why:
                    return move.code
                move = replace(move, kind=END, reason=f"{move.reason}; {why}")
            if move.kind == END:
                self.note("end", f"ends with exit code {move.code}: {move.reason}", code=move.code, reason=move.reason)
                return move.code
            if move.pause:
                self._wait(move)
            job = self._standing()
            if job is not None and not job.goes_on(self.backend.restart):
                why = policy.why_not_requeue(job, self.backend.restart, self.limits)
                self.note("end", f"ends without another attempt: {why}", code=move.code, reason=why)
                return move.code
            nodes = self.backend.nodes(job)

    def _standing(self) -> SlurmJob | None:
        return patiently(self.backend.standing, self.clock.pause, self.limits.patience)

    def _one(self, nodes: list[str]) -> Move:
        """One attempt, from the look at the nodes to the decision about what comes next."""
        if self._folder_is_lost():
            return Move(END, UNHEALTHY, self._lost)
        if self.asked:
            return Move(REQUEUE, STOPPED, f"{self._heard()} before the ranks were started")
        try:
            start = self._make_folders()
        except OSError as error:
            return replace(WRITE_FAILURE, reason=f"{error.filename}: {error.strerror}")
        self.backend.begin()
        chosen = self._choose(start.folder, nodes)
        if self.asked:
            return Move(REQUEUE, STOPPED, f"{self._heard()} before the ranks were started")
        if isinstance(chosen, Move):
            return chosen
        ended = self._attempt(replace(start, nodes=chosen))
        if self._folder_is_lost():
            return Move(END, UNHEALTHY, self._lost)
        self._suspicious = ended.cause in (HANG, CONTACT_LOSS)
        return policy.next_move(ended, self._past(), self.limits)

    def _past(self) -> Past:
        return Past.of(self.events, self.backend.job)

    def _wait(self, move: Move) -> None:
        """Pause before another attempt; a signal ends the pause."""
        text = f"waits {move.pause:.0f} s before another attempt: {move.reason}"
        self.note("waiting", text, seconds=move.pause, reason=move.reason)
        until = self.clock.now() + move.pause
        while self.clock.now() < until and not self.asked:
            self.clock.pause(min(POLL_SECONDS * POLLS_PER_READ, until - self.clock.now()))
            self._show()

    def _make_folders(self) -> Start:
        """The folders of the next attempt. Raises OSError."""
        while True:
            attempt = Attempt(self.backend.job, self.backend.restart, self._number)
            folder, logs = self.run_folder.attempt(attempt), self.run_folder.logs(attempt)
            self._number += 1
            with suppress(FileExistsError):  # by another supervisor in the same start of the job, or prepared
                logs.mkdir(parents=True)
                folder.mkdir(parents=True)
                self._made = folder
                return Start(str(attempt), folder, logs, (), attempt.number)

    def _choose(self, folder: Path, nodes: list[str]) -> tuple[str, ...] | Move:
        """Nodes for the next attempt, or what to do instead of it."""
        self._checks = {size: check for size, check in self._checks.items() if not check.refuses}  # a file may be back
        full = self._suspicious
        bad = self.backend.examine(nodes, folder, full, lambda: bool(self.asked))
        healthy = [node for node in nodes if node not in bad]
        if not self.asked:
            told = "; ".join(f"{node}: {why}" for node, why in bad.items())
            text = f"fit for use: {len(healthy)} of {counted(len(nodes), 'node')}{'; ' * bool(told)}{told}"
            self.note("preflight", text, ok=healthy, bad=bad)
        now = time.time()
        struck = policy.struck_nodes(self.events, now, self.limits.strikes)
        sizes = (self.wants.nodes, self.wants.least)
        choice = policy.choose(healthy, struck, policy.slow_nodes(self.events, now), sizes, self._fits)
        for node, why in choice.left_out:
            if node not in self._told_left_out:
                self._told_left_out.add(node)
                self.note("left_out", f"{node} is left out: {why}", node=node, reason=why)
        if choice.nodes:
            return choice.nodes
        if choice.fit >= self.wants.least:  # the configuration fits no number of nodes that there are
            check = self._checks[min(self.wants.nodes, choice.fit)]
            wanted = self._checks.get(self.wants.nodes) or self._checked(self.wants.nodes)
            if wanted.refuses:
                return policy.bad_input(f"refused: {wanted.text}", self._past(), self.limits)
            return Move(
                REQUEUE, NODE_SHORTAGE, f"training does not fit the {choice.fit} nodes that are left: {check.text}"
            )
        return policy.no_nodes(choice.fit, self.wants.least, self._past().stuck + 1, self.limits)

    def _fits(self, nodes: int) -> bool:
        return not self._checked(nodes).refuses

    def _checked(self, nodes: int) -> Check:
        if nodes not in self._checks:
            self._checks[nodes] = self._check(nodes * self.wants.ranks_per_node)
        return self._checks[nodes]

    def _attempt(self, start: Start) -> Ended:
        """Start ranks and wait for their end."""
        before, reported, began = self.run_folder.newest_step(), self.run_folder.reported(), self.clock.now()
        ranks = len(start.nodes) * self.wants.ranks_per_node
        fewer = f" (of {self.wants.nodes} wanted)" if len(start.nodes) < self.wants.nodes else ""
        where = f"{counted(ranks, 'rank')} on {counted(len(start.nodes), 'node')}{fewer}"
        told = f"attempt {start.name}: {where}, the newest checkpoint is of step {before}"
        self.note("attempt", told, attempt=start.name, nodes=list(start.nodes), ranks=ranks, step=before)
        try:
            running = self.backend.start(start, self.command)
        except OSError as error:
            seen = Seen(start.nodes, self.wants.ranks_per_node, FAILED, said=[str(error)], met=False)
        else:
            seen = self._watch(start, running)
        ended = judge(seen)
        if ended.first is None and ended.cause in RETRIED_CAUSES and seen.said:
            ended = replace(ended, first=First(None, None, seen.said[-1]))
        resumed = self.run_folder.resumed_step(reported)
        steps = (before if resumed is None else resumed, self.run_folder.newest_step())
        ended = replace(ended, asked=bool(self.asked), steps=steps, seconds=self.clock.now() - began)
        first = asdict(ended.first) if ended.first else None
        text = f"attempt {start.name} ended after {ended.seconds:.0f} s: {ended.cause}, steps {steps[0]} to {steps[1]}"
        text += f"; {ended.first}" if ended.first else ""
        details = {"from_step": steps[0], "to_step": steps[1], "seconds": ended.seconds}
        details |= {"asked": ended.asked, "met": ended.met}
        self.note("attempt_ended", text, attempt=start.name, cause=ended.cause, code=ended.code, first=first, **details)
        return ended

    def _watch(self, start: Start, running: Running) -> Seen:
        """Look after ranks until they have ended. Signals are handed on, and what does not end is killed."""
        patience, handed_on, killed, looks = Patience(self.limits, self.clock.now()), 0, "", 0
        if self.frozen is not None:
            self.frozen.look()
        while (code := running.poll()) is None:
            if self.asked and (handed_on < len(self.asked) or self.backend.where == "slurm"):
                for number in self.asked[handed_on:] or self.asked[-1:]:
                    running.ask_to_stop(number)
                handed_on = len(self.asked)
            if looks % POLLS_PER_READ == 0:
                self._tell_edits()
                self._show()
            if looks % POLLS_PER_READ == 0 and not killed:
                killed = self._lost if self._folder_is_lost() else self._too_long(start, patience)
                if killed:
                    self.note("reaped", f"attempt {start.name} is killed: {killed}", attempt=start.name, reason=killed)
                    running.kill(self.clock.pause)
            looks += 1
            self.clock.pause(POLL_SECONDS)
        if code and not killed:
            running.kill(self.clock.pause)  # ends what is left where srun or the launcher was killed
        self._look_anew(start.folder)
        out_of_time = False
        if self.asked:
            job = self.backend.standing()
            out_of_time = job is not None and "TimeLimit" in (job.reason, job.state.title())
        failures, outcome, said = read_failures(start.folder), read_outcome(start.folder), running.said()
        dumps = any((start.folder / "flight").glob("rank_*.json"))
        return Seen(
            start.nodes,
            self.wants.ranks_per_node,
            code,
            failures,
            outcome,
            said,
            reaped=killed,
            silent=bool(killed) and patience.silent,
            dumps=dumps,
            out_of_time=out_of_time,
            asked=bool(self.asked),
            full=no_room(self.run_folder.path) if code else "",
            # On one machine nobody is waited for; yet ranks that failed by themselves may not have met.
            met=have_met(start.folder) or (self.backend.where == "local" and code != FAILED),
        )

    def _tell_edits(self) -> None:
        """Say what of the configuration's files has been edited since the job was submitted."""
        if self.frozen is not None and (text := self.frozen.found()):
            self.note("edited", text, frozen=str(self.frozen.path), used=self.frozen.used)

    def _folder_is_lost(self) -> bool:
        """Return whether the run folder was removed or replaced. Going on would begin again at step 0."""
        for _ in range(POLLS_PER_READ):  # a file system may lose sight of a folder for a moment
            if self._lost or self._made is None or _is_there(self._made):
                return bool(self._lost)
            self.clock.pause(POLL_SECONDS)
        path = self.run_folder.path
        what = f"was replaced: {self._made} is gone" if _is_there(path) else "was removed"
        self._lost = (
            f"{path}: the run folder {what}, while the run was going on; nothing is started in it again. "
            "Put it back, and the same command goes on; without it, the run begins anew"
        )
        return True

    def _too_long(self, start: Start, patience: Patience) -> str:
        try:
            names = os.listdir(start.folder)
        except OSError:
            names = []
        failed = any(name.startswith("fail-") for name in names)
        trace = [_changed(path) for path in (self.run_folder.metrics, self.run_folder.checkpoints, start.folder)]
        return patience.look(self.clock.now(), failed, "outcome.json" in names, bool(self.asked), trace)

    def _look_anew(self, folder: Path) -> None:
        """Have a shared file system show what other nodes have written: a change of its own renews NFS's view."""
        with suppress(OSError):
            os.close(opened(folder / ".ended", os.O_WRONLY | os.O_CREAT))
            (folder / ".ended").unlink()

    def _requeue(self, move: Move) -> str:
        """Have Slurm start the job again, if it may. Returns why it does not; empty if it does."""
        if self.backend.where == "local":
            return "the same command goes on"
        tries: list[str] = []

        def attempt() -> str | None:
            """Return why the job is not requeued; empty if it is; None to try again."""
            job = self.backend.standing()
            if job is None:
                return None
            if why := policy.why_not_requeue(job, self.backend.restart, self.limits):
                return "" if tries and job.restarts > self.backend.restart else why
            if not tries:
                self.note(
                    "requeue", f"asking Slurm to requeue the job: {move.reason}", reason=move.reason, code=move.code
                )
                self.backend.end()
            tries.append(self.backend.requeue())
            return None if tries[-1] else ""

        why = patiently(attempt, self.clock.pause, self.limits.patience)
        if why is None:
            why = f"Slurm refused: {tries[-1]}" if tries else "Slurm does not answer"
        if why:
            self.note("not_requeued", f"not requeued: {why}", reason=why)
            return f"not requeued: {why}"
        return ""

    def _heard(self) -> str:
        return f"stopped by {signal.Signals(self.asked[0]).name}"


def _is_there(path: Path) -> bool:
    """Return whether a path leads somewhere, as far as the file system can tell."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _changed(path: Path) -> tuple[int, int] | None:
    """Time (ns) and size of a file or folder, which change when it is written to; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
