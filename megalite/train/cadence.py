"""Decides when a run is saved: every `checkpoint.interval` steps, or with `auto` at the interval that loses least time.

Steps that `checkpoint.at` lists are saved in any case.

With `auto`, rank 0 decides, from the times of saves and steps and the number of failures of the run, and sends the
interval to the others: ranks that each decided for themselves might round differently. docs/goodput.md has the rule.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megalite.base.errors import InputError, counted
from megalite.base.files import write_whole
from megalite.base.output import Outlet
from megalite.checkpoint.run.save import Saver
from megalite.train.build import Job
from megalite.train.folder.records import WARM_UP_STEPS
from megalite.train.report import Report, Silent
from megalite_launch.base.events import read_events
from megalite_launch.base.files import read_bytes
from megalite_launch.base.texts import lasting, scaled
from megalite_launch.goodput.learned import Rate, failure_rate, learned_interval
from megalite_launch.watch.failures import interruptions

MIN_STEPS = 3  # steps after the warm-up from which a first interval follows
STEP_WINDOW = 20  # latest steps of whose times the median is taken
SAVE_WINDOW = 5  # latest saves, likewise
COPY_BANDWIDTH, WRITE_BANDWIDTH = 10e9, 1e9  # bytes per second of a rank, assumed until a save has been measured
SAVED_BYTES = 12  # bytes of a parameter with its moments
MIN_CHANGE = 0.1  # change of an interval that the console shows
MAX_SAVE_SECONDS = 1e7  # seconds of a save, or of its writing, that are believed


@dataclass(frozen=True)
class Due:
    """Actions that are due after a step."""

    log: bool
    evaluate: bool
    save: bool  # to the shared folder
    save_locally: bool  # to the nodes

    @property
    def waits(self) -> bool:
        """Flag: the step must be judged at once, since it is evaluated or saved. A record alone can wait for the
        judgement, which comes one step later on a GPU."""
        return self.evaluate or self.save or self.save_locally


@dataclass(frozen=True)
class Decision:
    """An interval, and what it follows from. All times are seconds."""

    steps: int
    save: float  # seconds that training stands still for a save
    write: float
    step_seconds: float
    failures: int
    rate: Rate

    def __str__(self) -> str:
        seconds = self.steps * self.step_seconds
        return (
            f"a checkpoint every {counted(self.steps, 'step')} ({lasting(seconds)}): a save stops training for "
            f"{lasting(self.save)} and is written in {lasting(self.write)}; "
            f"{scaled(self.rate.hours, 'hours')} between failures of a rank, as {self.failures} were seen"
        )


def decide(save: float, write: float, step_seconds: float, ranks: int, failures: int, rank_hours: float) -> Decision:
    """The interval that `megalite_launch.goodput.learned` finds, in whole steps."""
    rate = failure_rate(failures, rank_hours)
    seconds = learned_interval(rate.mean, rate, rank_hours, ranks, save, write)
    steps = max(round(seconds / step_seconds), ceil(write / step_seconds), 1)
    return Decision(steps, save, write, step_seconds, failures, rate)


class Cadence:
    """Says after which steps a run logs, evaluates and saves. With a number as `checkpoint.interval`, at its multiples.

    Its methods are collective. report: that of rank 0 is a `Report`, and none of the others is.
    """

    def __init__(self, job: Job, report: Silent) -> None:
        self._job, self._report = job, report
        self._last = job.config.train.steps

    @staticmethod
    def of(job: Job, report: Silent) -> "Cadence":
        return Automatic(job, report) if job.config.checkpoint.interval == "auto" else Cadence(job, report)

    def begin(self, step: int, seconds: float) -> None:
        """Note that training begins after `step`, which is saved, or 0. seconds: of a clock that stops in pauses."""

    def stepped(self, step: int, seconds: float) -> None:
        """Note that a step was taken. seconds: of the clock of `begin`."""

    def due(self, step: int, saves_locally: bool) -> Due:
        """Return the actions that are due after `step`. saves_locally: whether nodes can be saved to."""
        config = self._job.config
        local = config.checkpoint.local
        return Due(
            log=self._every(config.log.interval, step),
            evaluate=self._every(config.eval.interval, step),
            save=self._saves(step),
            save_locally=saves_locally and local is not None and self._every(local.interval, step),
        )

    def _every(self, interval: int, step: int) -> bool:
        """Return whether something is due every `interval` steps and at the end; if that is 0, only at the end."""
        return step == self._last or (interval > 0 and step % interval == 0)

    def _saves(self, step: int) -> bool:
        checkpoint = self._job.config.checkpoint
        assert checkpoint.interval != "auto"
        return self._every(checkpoint.interval, step) or step in checkpoint.at

    @contextmanager
    def saving(self, step: int, saver: Saver, shared: bool) -> Iterator[None]:
        """Measure how long training stands still for the save made inside, and report it. shared: as for the save."""
        began = time.perf_counter()
        yield
        blocked = time.perf_counter() - began
        text = f"training stood still for {lasting(blocked)} to save step {step}"
        self._report.note(step, "saving" if shared else "saving_local", text, checkpoint=step, blocked=blocked)
        if shared:
            self._saved(step, blocked, saver.wrote)

    def _saved(self, step: int, blocked: float, wrote: float | None) -> None:
        """Note that the state after `step` is being written to the shared folder. wrote: seconds of the last write."""


class Automatic(Cadence):
    """The cadence of `checkpoint.interval: auto`. Steps that are kept or exported by their number are saved as well."""

    def __init__(self, job: Job, report: Silent) -> None:
        super().__init__(job, report)
        parameters = sum(part.to_local().numel() for _, part in job.named_parameters())  # type: ignore[attr-defined]
        async_ = job.config.checkpoint.async_
        write = SAVED_BYTES * parameters / WRITE_BANDWIDTH
        self._blocked: deque[float] = deque(maxlen=SAVE_WINDOW)
        self._steps: deque[float] = deque(maxlen=STEP_WINDOW)
        self._guess = (SAVED_BYTES * parameters / COPY_BANDWIDTH, write) if async_ else (write, 0.0)
        self._wrote: float | None = None
        self._clock = self._trained = 0.0  # readings of the meter's clock, and seconds of this start's steps
        self._base = 0  # the step that was saved last
        self._measures = 0  # the step after which a first choice is made
        self._interval = self._told = 0  # 0: not yet known
        if isinstance(report, Report):
            self._interval = self._recall(report.path.with_name("interval.json"))
        self._interval = self._agreed(self._interval)

    def begin(self, step: int, seconds: float) -> None:
        self._base, self._measures = step, step + WARM_UP_STEPS + MIN_STEPS
        self._clock = seconds
        self._steps.clear()

    def stepped(self, step: int, seconds: float) -> None:
        if step > self._measures - MIN_STEPS:
            self._steps.append(max(seconds - self._clock, 1e-6))
        self._trained += seconds - self._clock
        self._clock = seconds
        if step == self._measures and step < self._last:
            self._decide(step)

    def _saves(self, step: int) -> bool:
        # Where nothing is saved yet, the first save comes at once: it measures, and a failure finds it.
        if step == self._last or (self._interval and (self._base == 0 or step >= self._base + self._interval)):
            return True
        checkpoint = self._job.config.checkpoint
        regular = any(every and step % every == 0 for every in (checkpoint.keep_every, checkpoint.export_every))
        return regular or step in checkpoint.at

    def _saved(self, step: int, blocked: float, wrote: float | None) -> None:
        self._base = step
        if step == self._last:
            return
        slowest = torch.tensor(blocked, dtype=torch.float64, device=self._job.mesh.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._job.mesh.world)
        self._blocked.append(slowest.item())
        self._wrote = wrote if wrote is not None else self._wrote
        self._decide(step)

    def _decide(self, step: int) -> None:
        """Settle on an interval, on all ranks. Without a measured step, the one from before stays."""
        decision = None
        if isinstance(self._report, Report) and self._steps:
            decision = self._decision(self._report.path.parent)
        self._interval = self._agreed(decision.steps if decision is not None else self._interval)
        if decision is not None and isinstance(self._report, Report):
            self._tell(step, decision, self._report)

    def _decision(self, run: Path) -> Decision:
        guess_save, guess_write = self._guess
        save = median(self._blocked) if self._blocked else guess_save
        write = self._wrote if self._wrote is not None else guess_write
        failures, rank_hours = 0, 0.0
        with suppress(OSError):
            failures, rank_hours = interruptions(read_events(run / "events.jsonl"), time.time())
        ranks = self._job.mesh.layout.world_size
        rank_hours = max(rank_hours, ranks * self._trained / 3600)  # no supervisor writes attempts down: this start's
        return decide(save, write, median(self._steps), ranks, failures, rank_hours)

    def _agreed(self, interval: int) -> int:
        """The interval of rank 0, on all ranks."""
        told = torch.tensor(interval, dtype=torch.int64, device=self._job.mesh.device)
        dist.broadcast(told, 0, group=self._job.mesh.world)
        return int(told.item())

    def _tell(self, step: int, decision: Decision, report: Report) -> None:
        changed = abs(decision.steps - self._told) > MIN_CHANGE * self._told
        tell = report.event if changed else report.note
        kept = {"steps": decision.steps, "save": decision.save, "write": decision.write}
        more = {"step_seconds": decision.step_seconds, "failures": decision.failures, "hours": decision.rate.hours}
        tell(step, "interval", str(decision), **kept, **more)
        if changed:
            self._told = decision.steps
        path = report.path.with_name("interval.json")
        if self._blocked:  # measured times; assumed ones are not worth keeping
            with Outlet(str(path), failures=(OSError, InputError)):
                write_whole(path, json.dumps(kept) + "\n")

    def _recall(self, path: Path) -> int:
        """Take over the measurements of an earlier start. Returns its interval, or 0."""
        try:
            kept: Any = json.loads(read_bytes(path, 4096))
        except (OSError, ValueError, RecursionError):
            return 0
        steps = kept.get("steps") if isinstance(kept, Mapping) else None
        if type(steps) is not int or not 0 < steps <= 10**12:
            return 0
        times = [kept.get(name) for name in ("save", "write")]
        if not all(type(each) is float and isfinite(each) and 0 <= each < MAX_SAVE_SECONDS for each in times):
            return 0
        self._blocked.append(times[0])
        self._wrote = times[1]
        return steps
