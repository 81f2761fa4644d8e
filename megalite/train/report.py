"""Writes a run's numbers to the console, metrics.jsonl and trackers, under the same names."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from megalite.base.output import PATIENCE, Outlet, append, go_on
from megalite.base.terminal import escaping
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.save_events import (
    Failed,
    FailedLocally,
    LocalOff,
    NotServed,
    Outcome,
    Saved,
    SavedLocally,
    Served,
)
from megalite.config.schema import Config
from megalite.plan.routing import IN_TURN, UNTAUGHT
from megalite.train.folder.records import line_of, restore_end
from megalite.train.guard import Guard, Judged
from megalite.train.load_metrics import LoadMeter
from megalite.train.stragglers import Straggler
from megalite.train.tracking.trackers import trackers_of
from megalite_launch.base.events import append_event
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.base.texts import scaled, seconds_text

TROUBLE = ("bad_step", "spike", "grad_norm_jump", "rollback")
WARNINGS = (  # events
    *TROUBLE,
    "save_failed",
    "save_problem",
    "save_local_failed",
    "local_off",
    "not_served",
    "straggler",
    "experts_starved",
    IN_TURN,
    UNTAUGHT,
    "nothing_trained",
)
LOADS_OF_RUN = 100  # loads of experts that a run keeps for a picture: those of 60 layers with 256 take 60 kB
SENDING_SECONDS = 60.0  # seconds that the end of a run waits for its trackers


def _pass_over(name: str, error: Exception) -> None:
    """Say nothing about an output that is lost."""


# The console shows these fields of a record, in this order, each in its width; see docs/metrics.md.
CONSOLE_FIELDS: dict[str, Callable[[float], str]] = {
    "loss": lambda loss: f"loss {loss:7.4f}",
    "grad_norm": lambda norm: f"norm {norm:6.3f}" if norm < 100 else f"norm {norm:6.4g}",
    "learning_rate": lambda rate: f"lr {rate:.1e}",
    "step_seconds": lambda seconds: f"{seconds_text(seconds):>7}",
    "tokens_per_second": lambda rate: f"{scaled(rate, 'tok/s'):>11}",
    "tflops_per_device": lambda rate: f"{scaled(rate * 1e12, 'FLOP/s'):>12}",
    "mfu": lambda share: f"MFU {share:5.1%}",
    "peak_memory_bytes": lambda size: f"{scaled(size, 'B'):>7}",
    "expert_load": lambda most: f"load {most:4.2f}",
    "valid_loss": lambda loss: f"valid loss {loss:.4f}",
    "valid_perplexity": lambda perplexity: f"perplexity {perplexity:.4g}",
}
Record = dict[str, float]


class Saves(Protocol):
    """A source of news of saves, as `megalite.checkpoint.run.save.Saver` is."""

    def news(self) -> list[Outcome]: ...


class Silent:
    """The report of ranks that do not report: nothing happens. `Report` says what each method reports."""

    def say(self, text: str, style: str = "") -> None: ...

    def stepped(self, step: int) -> None: ...

    def record(self, step: int, values: Record) -> None: ...

    def load(self, step: int, meter: LoadMeter) -> None: ...

    def event(self, step: int, name: str, text: str, **details: Any) -> None: ...

    def note(self, step: int, name: str, text: str, **details: Any) -> None: ...

    def trouble(self, judged: Judged, jumps: bool) -> None: ...

    def straggler(self, step: int, found: Straggler) -> None: ...

    def rollback(self, judged: Judged, progress: Progress) -> None: ...

    def evaluation_cut(self, step: int, asked: tuple[str, ...]) -> None: ...

    def stopped(self, guard: Guard, start: Progress) -> None: ...

    @contextmanager
    def saves(self, step: int, saver: Saves) -> Iterator[None]:
        yield


class Report(Silent):
    """Reports a run from its one reporting rank; a context manager.

    `metrics.jsonl` is append-only: a `resumed` event invalidates the records after `first_step` of a killed run. A file
    that cannot be written to does not disturb the run; an event is written as soon as that works. check_owner: called
    before that file changes; does not return where the folder has become another job's.
    """

    def __init__(
        self, folder: Path, config: Config, first_step: int, check_owner: Callable[[], None] = lambda: None
    ) -> None:
        self.steps, self.step, self._check_owner = config.train.steps, first_step, check_owner
        self.loads: int | None = None  # the part of the run in which they were last reported
        self.console = escaping(Console())
        self.path = folder / "metrics.jsonl"
        self.metrics = Outlet(str(self.path))
        self.events = Outlet(str(RunFolder(folder).events))
        self.unwritten = b""  # events for which there was no room
        cut, resumed = None, False
        with self.metrics:
            check_owner()
            cut = restore_end(self.path)
            resumed = self.path.exists() and self.path.stat().st_size > 0
        self.trackers = trackers_of(folder, config, first_step)
        self.sending = min(SENDING_SECONDS, config.train.timeout / 2)  # the watchdog is awake
        self.progress = Bar(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task(config.run.name, total=self.steps, completed=first_step)
        self.began, self.first_step = time.monotonic(), first_step
        if cut is not None:
            self.say(f"{self.path}: cut off its half-written last line {cut[:80]}")
        if resumed:
            self.note(first_step, "resumed", f"resumed at step {first_step}")

    def __enter__(self) -> "Report":
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()
        if error is not None:  # the user is told where the rank ends
            reason = str(error) or type(error).__name__
            self.note(self.step, "failed", reason, reason=reason)
        code, patience = (0, self.sending) if error is None else (1, PATIENCE)
        for outlet, tracker in self.trackers:
            with Outlet(outlet.name, _pass_over if outlet.lost else go_on, outlet.failures):  # has been told once
                tracker.end(code)
        last = time.monotonic() + patience  # they send at the same time
        for outlet, tracker in self.trackers:
            with Outlet(outlet.name):
                tracker.wait(last - time.monotonic())

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style), soft_wrap=True)

    def stepped(self, step: int) -> None:
        self.step = step
        self.progress.update(self.task, completed=step)

    def record(self, step: int, values: Record) -> None:
        """Report `values`, which hold after `step` optimizer steps."""
        self._write(step, values)
        for outlet, tracker in self.trackers:
            with outlet:
                tracker.scalars(step, values)
        hidden = "tflops_per_device" if "mfu" in values else ""
        shown = [show(values[name]) for name, show in CONSOLE_FIELDS.items() if name in values and name != hidden]
        self.say(f"step {step:>{len(str(self.steps))}}/{self.steps}  " + "  ".join(shown) + self._remaining(step))

    def load(self, step: int, meter: LoadMeter) -> None:
        """Report the latest loads of experts, at most `LOADS_OF_RUN` times in a run."""
        part = step * LOADS_OF_RUN // self.steps
        if meter.latest.any() and part != self.loads:
            self.loads = part
            self._write(step, {"event": "expert_load", "layers": meter.layers, "load": meter.latest.tolist()})

    def event(self, step: int, name: str, text: str, **details: Any) -> None:
        """Report what happened to the run at `step`: as text, and as details for programs."""
        self.note(step, name, text, **details)
        self.say(text, "yellow" if name in WARNINGS else "")

    def trouble(self, judged: Judged, jumps: bool) -> None:
        """Report a step that is not good, or whose gradients are much larger than those before."""
        if judged.verdict == "good":
            if jumps:
                text = f"the gradient norm jumps: {judged}"
                self.event(judged.step, "grad_norm_jump", text, grad_norm=judged.reading.norm)
            return
        self.event(
            judged.step,
            "bad_step" if judged.verdict == "bad" else "spike",
            f"{'bad step' if judged.verdict == 'bad' else 'loss spike'}, {judged.answer}: {judged}",
            samples=[judged.batch.first, judged.batch.end],
            loss=judged.reading.loss,
            grad_norm=judged.reading.norm,
            parameters=judged.parameters,
            answer=judged.answer,
        )

    def rollback(self, judged: Judged, progress: Progress) -> None:
        """Report that a step was taken back, and the progress from which the run goes on."""
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in progress.left_out)
        text = f"rolled back from step {judged.step} to {progress.step}; left out: samples {ranges}"
        self.event(progress.step, "rollback", text, taken_back=judged.step, left_out=progress.left_out)

    def evaluation_cut(self, step: int, asked: tuple[str, ...]) -> None:
        """Report that an evaluation has no result. asked: the signals that asked the run to stop."""
        text = f"the evaluation after step {step} is cut short by {' and '.join(asked)}, and left out"
        self.event(step, "evaluation_cut", text, signals=asked)

    def stopped(self, guard: Guard, start: Progress) -> None:
        """Report that a run which began at `start` ends before its last step, as it was asked to."""
        step, names = guard.progress.step, " and ".join(guard.stopped_by)
        saved = f"after step {step}, which is saved" if step > start.step else "before the first step"
        text = f"stopped by {names} {saved}; the same command continues"
        self.event(step, "stopped", text, signals=guard.stopped_by)

    @contextmanager
    def saves(self, step: int, saver: Saves) -> Iterator[None]:
        """Report the saves that have ended when the block is left, in whatever way."""
        try:
            yield
        finally:
            for news in saver.news():
                self._save(step, news)

    def _save(self, step: int, news: Outcome) -> None:
        match news:
            case Failed():
                text = f"the checkpoint of step {news.step} could not be written: {news.error}"
                self.event(step, "save_failed", text, checkpoint=news.step, error=news.error)
            case FailedLocally():
                text = f"the local checkpoint of step {news.step} could not be written: {news.error}"
                self.event(step, "save_local_failed", text, checkpoint=news.step, error=news.error)
            case LocalOff():
                self.event(step, "local_off", news.error, error=news.error)
            case Served():
                text = f"served: step {news.step}, taken in {news.seconds:.1f} s"
                self.event(step, "served", text, checkpoint=news.step, path=str(news.path), seconds=news.seconds)
            case NotServed():
                text = f"the export of step {news.step} was not taken: {news.error}; training goes on"
                self.event(step, "not_served", text, checkpoint=news.step, error=news.error)
            case SavedLocally():
                copies = f", and {news.replicas} copy on another node" if news.replicas else ""
                text = f"saved locally: step {news.step}, {scaled(news.bytes, 'B')}{copies} in {news.seconds:.1f} s"
                size = {"bytes": news.bytes, "seconds": news.seconds, "replicas": news.replicas}
                self.event(step, "saved_local", text, checkpoint=news.step, path=str(news.path), **size)
            case Saved():
                text = f"saved {news.path}: {scaled(news.bytes, 'B')} in {news.seconds:.1f} s"
                size = {"bytes": news.bytes, "seconds": news.seconds}
                self.event(step, "saved", text, checkpoint=news.step, path=str(news.path), **size)
                for problem in news.problems:
                    self.event(step, "save_problem", problem, checkpoint=news.step, problem=problem)

    def straggler(self, step: int, found: Straggler) -> None:
        """Report a slow rank, to the supervisor too."""
        details = {"rank": found.rank, "node": found.node, "section": found.section, "ratio": found.ratio}
        self.event(step, "straggler", str(found), **details)
        with self.events:
            self._check_owner()
            append_event(Path(self.events.name), "straggler", "rank 0", str(found), **details, step=step)

    def note(self, step: int, name: str, text: str, **details: Any) -> None:
        """Report an event everywhere but on the console."""
        self.step = step
        self._write(step, {"event": name, **details}, lasting=True)
        for outlet, tracker in self.trackers:
            with outlet:
                tracker.event(step, name, text)

    def _write(self, step: int, values: Mapping[str, Any], lasting: bool = False) -> None:
        """Add a line to metrics.jsonl. If there is no room, a lasting line waits for it."""
        lines = self.unwritten + line_of(step, values)
        with self.metrics:
            self._check_owner()
            append(self.path, lines)
            self.unwritten = b""
            return
        if lasting:
            self.unwritten = lines

    def _remaining(self, step: int) -> str:
        done = step - self.first_step
        if done <= 0 or step >= self.steps or self.console.is_terminal:  # there the bar tells it
            return ""
        seconds = (time.monotonic() - self.began) / done * (self.steps - step)
        return f"  ETA {timedelta(seconds=round(seconds))}"
