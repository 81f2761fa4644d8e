"""Accounts of a run's time. Every microsecond from its beginning is in one account; docs/watching.md has the rules.

The ledger receives events in the order of time. The time up to `cursor` is accounted for; an earlier event counts as
one at `cursor`, so clocks that differ move a second from one account to another, but lose none.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Optional

TRAINING, SAVING, EVALUATING, RESTARTING, LOST_TIME, WAITING = ACCOUNTS = (
    "training", "saving", "evaluating", "restarting", "lost", "waiting",
)  # fmt: skip
SECOND = 1_000_000
MAX_DELAY = 60 * SECOND  # a record that comes so long after the end of an attempt is one of it
CLEAN_CAUSES = ("finished", "stopped")  # causes of an end at which everything was saved,
CLEAN_CODES = (0, 3, None)  # with these exit codes: a second Ctrl-C saves nothing
MAX_STEP = 10**7 * SECOND
Spent = dict[str, int]


def nothing() -> Spent:
    return dict.fromkeys(ACCOUNTS, 0)


@dataclass
class AttemptSpan:
    """An attempt, or a start of a run without a supervisor. Times are microseconds since 1970."""

    name: str
    began: int
    ended: Optional[int] = None
    cause: str = ""
    code: Optional[int] = None
    first: Optional[dict[str, Any]] = None  # rank, node and text of the first failure
    nodes: list[str] = field(default_factory=list)
    ranks: int = 0
    from_step: Optional[int] = None
    to_step: Optional[int] = None
    spent: Spent = field(default_factory=nothing)


class Ledger:
    """The accounts of one run."""

    def __init__(self) -> None:
        self.began: Optional[int] = None
        self.cursor = 0
        self.sign = 0  # the latest time at which the run was heard of
        self.spent = nothing()
        self.parts: list[AttemptSpan] = []
        self.phase = "queue"  # then "starting", "training", and "ended" until the next start
        self.job_on = False  # whether a job is known to hold the nodes
        self.step = 0
        self.lost_steps = 0
        self.usual = 0  # microseconds of a step, by the latest record
        # Steps that count, in order: up to which, the time they took, whose attempt, their loss and seconds.
        self.steps, self.took, self.owner = array("q"), array("q"), array("l")
        self.losses, self.seconds = array("d"), array("d")
        self._part: Optional[AttemptSpan] = None
        self._unbound = False  # the latest start has come before the attempt that it belongs to
        self._ended_at, self._well = 0, False
        self._tail = (0, LOST_TIME)  # microseconds after the last record, and the account that they were given to
        self._heard = False  # whether the run has reported anything
        self._resumed = False  # whether this start has said from where

    def at(self, time: int) -> int:
        """Note a sign of life; return the time to reckon with."""
        if self.began is None:
            self.began = self.cursor = self.sign = time
        self.sign = max(self.sign, time)
        return max(time, self.cursor)

    # Events of the supervisor

    def submitted(self, time: int) -> None:
        self.at(time)

    def job_began(self, time: int) -> None:
        before = self.sign
        now = self.at(time)
        if self._unbound:
            self.job_on = True
            return
        self._close(before)
        self._spend(now, WAITING, None)
        self.phase, self.job_on = "starting", True
        self._part = None

    def attempt_began(self, time: int, name: str, nodes: list[str], ranks: int, step: Optional[int]) -> None:
        before = self.sign
        now = self.at(time)
        if not self._unbound:
            waited = self.phase == "queue" or (self.phase == "ended" and not self.job_on)
            self._close(before if self.phase == "training" else now)
            self._open(name, None if waited else self.cursor, now)
            self.phase, self._resumed = "starting", False
            if step is not None and not self._heard:
                self.step = step
        assert self._part is not None
        self._part.name, self._part.nodes, self._part.ranks = name, nodes, ranks
        if not self._unbound:
            self._part.from_step = step
        self._unbound, self.job_on = False, True

    def attempt_ended(
        self, time: int, cause: str, code: Optional[int], first: Optional[dict[str, Any]], step: Optional[int]
    ) -> None:
        now = self.at(time)
        self._end(now, cause in CLEAN_CAUSES and code in CLEAN_CODES)
        if self._part is not None:
            part = self._part
            part.ended, part.cause, part.code, part.first, part.to_step = now, cause, code, first, step

    def job_ended(self, time: int) -> None:
        now = self.at(time)
        if self.phase != "ended":
            self._end(now, False)
        self._close(now)
        self._spend(now, RESTARTING if self.job_on else WAITING, None)
        self.phase, self.job_on, self._part = "queue", False, None

    # Events of training

    def resumed(self, time: int, step: int) -> None:
        before = self.sign
        now = self.at(time)
        if self.phase == "starting" and self._part is not None and not self._resumed:
            pass  # the attempt is known
        else:
            waited = not self.job_on
            self._close(before if self.phase == "training" else now)
            self._open(f"start {len(self.parts) + 1}", None if waited else self.cursor, now)
            self._unbound = True
        assert self._part is not None
        self._part.from_step = step  # not the newest checkpoint, where that is damaged
        self._resumed, self._heard = True, True
        self._go_back(step)
        self.phase = "starting"

    def rolled_back(self, time: int, step: int) -> None:
        now = self.at(time)
        if self.phase != "training":
            return
        self._spend(now, LOST_TIME, self._part)
        self._tail = (0, LOST_TIME)
        self._go_back(step)
        self.phase, self._resumed = "starting", True

    def record(self, time: int, step: int, step_time: int, loss: float, seconds: float) -> None:
        """Steps up to `step` were made. step_time: of one, in microseconds; seconds: the same as it was told."""
        step_time = min(step_time, MAX_STEP)
        if self.began is None:
            self.began = self.cursor = self.sign = time - step * step_time if step < 100 else time - step_time
        now = self.at(time)
        self.usual = step_time
        if self._begins_or_goes_on(now, step):
            self._step_to(self._inside(now), step, loss, seconds)

    def evaluated(self, time: int, step: int) -> None:
        now = self.at(time)
        if self._begins_or_goes_on(now, step) and self.steps:
            self._steps_unreported(now, step)
            self._spend(self._inside(now), EVALUATING, self._part)

    def saved(self, time: int, step: int, blocked: int) -> None:
        """Training has just stood still for `blocked` microseconds, to save `step`."""
        now = self.at(time)
        if self._begins_or_goes_on(now, step):
            now = self._inside(now)
            self._step_to(max(now - blocked, self.cursor), step)
            self._spend(now, SAVING, self._part)

    def training_ended(self, time: int, step: int, well: bool) -> None:
        now = self.at(time)
        if self.phase == "training" and well:
            self._steps_unreported(now, step)
            self._spend(now, SAVING, self._part)
        self._end(now, well)
        if self._part is not None and self._part.ended is None and not self.job_on:
            self._part.ended, self._part.to_step = now, step
            self._part.cause = "stopped" if well else "failed"

    # How time is spent

    def _spend(self, until: int, account: str, part: Optional[AttemptSpan]) -> int:
        amount = until - self.cursor
        if amount <= 0:
            return 0
        self.spent[account] += amount
        if part is not None:
            part.spent[account] += amount
        self.cursor = until
        return amount

    def _move(self, amount: int, source: str, target: str, part: Optional[AttemptSpan]) -> None:
        self.spent[source] -= amount
        self.spent[target] += amount
        if part is not None:
            part.spent[source] -= amount
            part.spent[target] += amount

    def _open(self, name: str, began: Optional[int], now: int) -> None:
        """Begin a new attempt. Times are microseconds.

        The time until `now` is a restart since `began`; without `began` it is waiting.
        """
        self._part = AttemptSpan(name, now if began is None else began)
        self.parts.append(self._part)
        self._spend(now, WAITING if began is None else RESTARTING, None if began is None else self._part)
        self._resumed = False

    def _end(self, now: int, well: bool) -> None:
        """Note that ranks are gone. Time under way is accounted for when the next start says how much of it counts."""
        if self.phase == "training":
            self._ended_at, self._well = now, well
        elif self.phase == "starting":
            self._spend(now, RESTARTING, self._part)
            self._ended_at, self._well = now, well
        elif self.phase == "ended":
            self._ended_at = max(self._ended_at, now)
        else:
            return
        self.phase, self._unbound = "ended", False

    def _close(self, silent_since: int) -> None:
        """Account for the end of the attempt before: if no event reports it, the time of its last sign of life."""
        if self.phase in ("training", "starting"):
            self._end(max(silent_since, self.cursor), False)
        if self.phase == "ended":
            account = self._ending()
            self._tail = (self._spend(self._ended_at, account, self._part), account)
            if self._part is not None and self._part.ended is None:  # nobody has told it
                self._part.ended = self._ended_at
                self._part.cause = "stopped" if self._well else ""
        self._unbound = False

    def _ending(self) -> str:
        """Choose the account of the time from an attempt's last report to its end; without one, nothing was lost."""
        return RESTARTING if self._part is None else SAVING if self._well else LOST_TIME

    def _inside(self, now: int) -> int:
        return min(now, self._ended_at) if self.phase == "ended" else now

    def _begins_or_goes_on(self, now: int, step: int) -> bool:
        """Return whether a report counts; the first one of a start ends its time of starting."""
        late = self._heard and not self._resumed and now <= self._ended_at + MAX_DELAY
        if self.phase in ("queue", "starting") and late:
            return False
        if self.phase == "ended" and not late and now > self._ended_at + MAX_DELAY:
            self._close(now)
            self.phase = "queue"
        if self.phase == "queue" or self._part is None:
            self.phase = "queue"
            self._open(f"start {len(self.parts) + 1}", None, self.cursor)
            self._unbound = True
        if self.phase in ("queue", "starting"):
            done = max(step - self.step, 1) * self.usual
            self._spend(now - done, RESTARTING, self._part)
            self._tail = (0, LOST_TIME)
            self._push(self.step, 0)
            self.phase = "training"
        self._heard = True
        return True

    def _step_to(self, now: int, step: int, loss: float = float("nan"), seconds: float = float("nan")) -> None:
        self._push(max(step, self.step), self._spend(now, TRAINING, self._part), loss, seconds)

    def _steps_unreported(self, now: int, step: int) -> None:
        """Steps after the last record, which have ended without one."""
        if step > self.step:
            self._step_to(min(self.cursor + (step - self.step) * self.usual, self._inside(now)), step)

    def _push(self, step: int, took: int, loss: float = float("nan"), seconds: float = float("nan")) -> None:
        self.step = step
        self.steps.append(step)
        self.took.append(took)
        self.owner.append(len(self.parts) - 1)
        self.losses.append(loss)
        self.seconds.append(seconds)

    def _go_back(self, step: int) -> None:
        """Go on from `step`: training done after it is lost, and unreported training up to it counts."""
        amount, account = self._tail
        if step > self.step and amount and self.parts:
            counts = min(amount, (step - self.step) * self.usual)
            owner = self.owner[-1] if self.owner else len(self.parts) - 1
            self._move(counts, account, TRAINING, self.parts[owner])
            self._push(step, counts)
            self.owner[-1] = owner
        self._tail = (0, LOST_TIME)
        self.lost_steps += max(self.step - step, 0)
        while self.steps and self.steps[-1] > step:
            before = self.steps[-2] if len(self.steps) > 1 else 0
            keep = 0
            if before < step:  # some of these steps count
                keep = self.took[-1] * (step - before) // (self.steps[-1] - before)
            self._move(self.took[-1] - keep, TRAINING, LOST_TIME, self.parts[self.owner[-1]])
            if keep:
                self.took[-1], self.steps[-1] = keep, step
                break
            for each in (self.steps, self.took, self.owner, self.losses, self.seconds):
                each.pop()
        self.step = step

    # Results

    def accounts(self, now: int, living: bool, checkpoint: Optional[int]) -> tuple[Spent, int]:
        """Return the time of every account, and when it ends. living: at `now`; else at the last sign of life.

        checkpoint: after a failure, training since this newest checkpoint counts as lost until reports show otherwise.
        The sum of all accounts is exactly the time from `began` to the end.
        """
        spent = dict(self.spent)
        if self.began is None:
            return spent, now
        end = max(now if living else self.sign, self.cursor)
        rest = end - self.cursor
        if self.phase == "training":
            spent[TRAINING] += rest
        elif self.phase == "starting":
            spent[RESTARTING] += rest
        elif self.phase == "queue":
            spent[WAITING] += rest
        else:
            ending = min(max(self._ended_at - self.cursor, 0), rest)
            spent[self._ending()] += ending
            spent[RESTARTING if self.job_on else WAITING] += rest - ending
        if self.phase in ("ended", "queue") and not self._well and checkpoint is not None:
            gone = self._beyond(checkpoint)
            spent[TRAINING] -= gone
            spent[LOST_TIME] += gone
        return spent, end

    def _beyond(self, step: int) -> int:
        """The time that steps after `step` took."""
        gone, at = 0, len(self.steps) - 1
        while at >= 0 and self.steps[at] > step:
            before = self.steps[at - 1] if at else 0
            keep = self.took[at] * (step - before) // (self.steps[at] - before) if before < step else 0
            gone += self.took[at] - keep
            at -= 1
        return gone
