"""The attempts of a job without a supervisor, as on Kubernetes: they are written down, and do not go on forever.

Kubernetes starts a machine's pod again whatever has happened, and goes by exit codes alone. So machine 0 keeps the
events of the run: `attempt`, `attempt_ended` with what a supervisor would say of it, and `end` where trying again is of
no use. The exit codes of machines then say so. Whoever is started after the `end` ends at once.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.events import Event, append_event, read_events
from ..base.free_space import no_room
from ..base.outcome import (
    BAD_INPUT,
    DONE,
    INTERRUPTED,
    LOST_CONTACT,
    STOPPED,
    UNHEALTHY,
    have_met,
    read_failures,
    read_outcome,
)
from ..base.run_folder import Attempt, RunFolder, node_name
from ..base.texts import counted, escaped
from ..base.verdict import INPUT_ERROR, KILL, RETRIED_CAUSES, First, Seen, judge
from ..status import page
from .policy import END, REQUEUE, STANDSTILL, Past, RestartLimits, next_move

FINAL_CODES = (DONE, BAD_INPUT, UNHEALTHY, INTERRUPTED, STANDSTILL)  # exit codes after which the job is not tried again
LIMITS = RestartLimits()


@dataclass
class Journal:
    """The events of one job. node: the number of this machine; the methods are for machine 0, but for two."""

    run: RunFolder
    job: str
    node: int
    nodes: int
    ranks: int  # on each
    attempt: Path | None = field(default=None, init=False)  # the folder of the one under way
    _before: int = field(default=0, init=False)  # the step of the newest checkpoint then
    _reported: int = field(default=0, init=False)  # bytes of reports then
    _began: float = field(default=0.0, init=False)

    def over(self) -> int | None:
        """The exit code with which the job has ended; None if it goes on. For all machines."""
        codes = [event.get("code") for event in self._events() if event["event"] == "end"]
        return next((code for code in reversed(codes) if type(code) is int and code in FINAL_CODES), None)

    def begin(self) -> int | None:
        """Write down that an attempt begins; or, if it would be of no use, that the job ends, and its exit code.

        Raises OSError if the run folder cannot be written to.
        """
        events = self._events()
        if not events:
            self._note("begin", f"begins at step {self.run.newest_step()} on {counted(self.nodes, 'machine')}")
        self._close(events)
        if (stuck := Past.of(self._events(), self.job).stuck) >= LIMITS.attempts:
            return self._give_up(f"{stuck} attempts in a row have saved no newer checkpoint")
        number = sum(event["event"] == "attempt" for event in events)
        while self.attempt is None:
            name = Attempt(self.job, 0, number)
            with suppress(FileExistsError):
                self.run.logs(name).mkdir(parents=True)
                self.run.attempt(name).mkdir(parents=True)
                self.attempt = self.run.attempt(name)
            number += 1
        self._before, self._reported, self._began = self.run.newest_step(), self.run.reported(), time.monotonic()
        nodes = [node_name(), *(f"machine {other}" for other in range(1, self.nodes))]
        ranks = counted(self.nodes * self.ranks, "rank")
        text = f"attempt {name}: {ranks}, the newest checkpoint is of step {self._before}"
        details = {"attempt": str(name), "nodes": nodes, "ranks": self.nodes * self.ranks, "step": self._before}
        self._note("attempt", text, **details)
        return None

    def finish(self, code: int) -> int:
        """Write down how the attempt has ended. code: of this machine. Returns the exit code to end with."""
        assert self.attempt is not None
        failures, outcome = read_failures(self.attempt), read_outcome(self.attempt)
        full = no_room(self.run.path) if code else ""
        ended = judge(Seen((), self.ranks, code, failures, outcome, full=full, met=have_met(self.attempt)))
        if ended.first is None and ended.cause in RETRIED_CAUSES:
            ended = replace(ended, first=First(None, node_name(), f"its ranks ended with exit code {code}"))
        resumed = self.run.resumed_step(self._reported)
        steps = (self._before if resumed is None else resumed, self.run.newest_step())
        seconds = time.monotonic() - self._began
        ended = replace(ended, steps=steps, seconds=seconds)
        first = asdict(ended.first) if ended.first else None
        told = {"cause": ended.cause, "code": ended.code, "first": first, "from_step": steps[0], "to_step": steps[1]}
        told["met"] = ended.met
        text = f"ended after {seconds:.0f} s: {ended.cause}, steps {steps[0]} to {steps[1]}"
        text += f"; {ended.first}" if ended.first else ""
        name = self.attempt.name
        self._note("attempt_ended", f"attempt {name} {text}", attempt=name, seconds=seconds, asked=False, **told)
        if (over := self.over()) is not None:  # another machine has told it
            return over
        past = Past.of(self._events(), self.job)
        if ended.cause != INPUT_ERROR:  # Kubernetes counts failures and pauses by itself
            past = replace(past, pauses=0)
        move = next_move(ended, past, LIMITS)
        if move.kind == END:
            if move.code not in FINAL_CODES:
                return self._give_up(move.reason)
            self._note("end", f"ends with exit code {move.code}: {move.reason}", code=move.code, reason=move.reason)
        elif move.kind == REQUEUE:
            self._note("requeue", f"to be started again: {move.reason}", reason=move.reason, code=STOPPED)
        elif ended.cause == INPUT_ERROR:
            self._note("waiting", f"to be started again: {move.reason}", reason=move.reason)
            return LOST_CONTACT  # else Kubernetes would end the job
        return move.code

    def show(self, at_once: bool = False) -> None:
        """Bring the page of the run up to date."""
        with suppress(Exception):  # whatever is wrong with a page, ranks are looked after
            page.write(self.run.path, at_once=at_once)

    def note_end(self, code: int) -> int:
        """Write down that this machine's ranks have ended with a code after which nothing is tried again.

        Returns the exit code to end with: another one for bad input of a job that has trained, which machine 0 counts.
        """
        if code == BAD_INPUT and self.over() is None and Past.of(self._events(), self.job).trained:
            return LOST_CONTACT
        reason = f"ranks of machine {self.node} on {node_name()} ended with exit code {code}"
        if code in FINAL_CODES and code != DONE and self.over() is None:
            self._note("end", f"ends with exit code {code}: {reason}", code=code, reason=reason)
        return code

    def _give_up(self, reason: str) -> int:
        self._note("end", f"ends with exit code {STANDSTILL}: {reason}", code=STANDSTILL, reason=reason)
        return STANDSTILL

    def _close(self, events: list[Event]) -> None:
        """Write down the end of an attempt that machine 0 could not tell, as it was killed."""
        told = {event.get("attempt") for event in events if event["event"] == "attempt_ended"}
        for event in events[-1:]:
            if event["event"] == "attempt" and event.get("attempt") not in told:
                newest, before = self.run.newest_step(), event.get("step")
                first = {"rank": None, "node": None, "text": "machine 0 was killed"}
                details = {"attempt": event.get("attempt"), "cause": KILL, "code": LOST_CONTACT, "first": first}
                name = Attempt.parse(str(event.get("attempt")))
                details["met"] = name is not None and have_met(self.run.attempt(name))
                text = f"attempt {event.get('attempt')} ended and nobody has told how: machine 0 was killed"
                self._note("attempt_ended", text, from_step=before, to_step=newest, asked=False, **details)

    def _events(self) -> list[Event]:
        """Events of this job about its course."""
        try:
            found = read_events(self.run.events)
        except OSError:
            return []
        return [event for event in found if event.get("job") == self.job and event.get("by") == "node"]

    def _note(self, event: str, text: str, **details: Any) -> None:
        try:
            append_event(self.run.events, event, "node", text, job=self.job, restart=0, **details)
        except OSError as error:  # a full disk changes no exit code
            text += f" ({self.run.events} cannot be written: {error.strerror})"
        print(f"megalite-node: {escaped(text)}", file=sys.stderr, flush=True)
