"""The training loop: what happens in a run, in order."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import nan

import torch

from megalite.checkpoint.progress import Progress
from megalite.checkpoint.save import Failed, Saver
from megalite.data.loader import Loader
from megalite.plan.batches import GlobalBatch, global_batches
from megalite.plan.size import flops_per_token
from megalite.train.build import Job
from megalite.train.guard import Guard, Judged, Requests
from megalite.train.metrics import throughput
from megalite.train.report import Record, Report
from megalite.train.step import evaluate, train_step

STOPPED = 3  # exit code: on request, to be continued


@dataclass(frozen=True)
class Batches:
    """Where a run's batches come from."""

    train: Loader
    valid: Loader | None


def train(
    job: Job,
    batches: Batches,
    start: Progress,
    saver: Saver,
    reload: Callable[..., Progress | None],
    report: Report | None,
) -> int:
    """Train from `start` to `train.steps`, on every rank; the exit code.

    reload: continues from the newest checkpoint if there is one, given a step from one before it. report: on the rank
    that reports. Raises Unhealthy when a guard ends the run.
    """
    last = job.config.train.steps
    guard = Guard(job, start)
    with Requests() as requests:
        job.activity.asked = requests.received
        if start.step == 0:
            _validate(job, batches, 0, report)
        while guard.progress.step < last and not guard.stopped_by:
            taken_back = _train(job, batches, saver, report, guard, requests)
            if taken_back is not None:
                job.activity("rolling back")
                saver.wait()
                guard.roll_back(taken_back, reload)
                _tell_rollback(report, taken_back, guard.progress)
        job.activity("saving")
        try:
            saver.finish()
        finally:
            _tell_saves(report, saver, guard.progress.step)
    if guard.progress.step < last:
        _tell_stop(report, guard)
        return STOPPED
    return 0


def _train(
    job: Job, batches: Batches, saver: Saver, report: Report | None, guard: Guard, requests: Requests
) -> Judged | None:
    """Train to the end, to a request to stop, or to a step that is to be taken back: that step."""
    config, last, progress = job.config, job.config.train.steps, guard.progress
    meter = Meter(job)
    job.activity("reading a batch")
    wanted = islice(global_batches(config, progress.samples, progress.left_out), last - progress.step)
    for step, (batch, micros) in enumerate(batches.train.batches(wanted), start=progress.step + 1):
        job.activity.step = step
        guard.watch(step, batch, train_step(job, micros, step - 1, requests.received))

        sections = config.log, config.eval, config.checkpoint
        logs, evaluates, saves = (_due(step, section.interval, last) for section in sections)
        for judged in guard.judge(at_once=logs or evaluates or saves):
            meter.add(judged)
            _tell_trouble(report, judged)
            if not guard.allows(judged):
                return judged
        if report is not None:
            report.stepped(step)
            _tell_saves(report, saver, step)

        if logs:
            record = meter.read() | {"tokens": guard.progress.tokens}
            if report is not None:
                report.record(step, record)
        if evaluates:
            with meter.paused():
                _validate(job, batches, step, report)
        if saves or guard.stopped_by:
            with meter.paused():
                job.activity("saving")
                try:
                    saver.save(guard.progress)
                finally:
                    _tell_saves(report, saver, step)
        if guard.stopped_by:
            break
        job.activity("reading a batch")
    return None


def _due(step: int, interval: int, last: int) -> bool:
    """Every `interval` steps, and at the end; 0: at the end only."""
    return step == last or (interval > 0 and step % interval == 0)


def _validate(job: Job, batches: Batches, step: int, report: Report | None) -> None:
    """Evaluate on the first `eval.steps` batches of the validation data, the same every time."""
    size, steps = job.config.batch.global_, job.config.eval.steps
    if batches.valid is None or steps == 0:
        return
    wanted = [GlobalBatch(size * index, size) for index in range(steps)]
    loss = evaluate(job, (micros for _, micros in batches.valid.batches(wanted)))
    if report is not None:
        report.record(step, {"valid_loss": loss, "valid_perplexity": torch.tensor(loss).exp().item()})


def _tell_trouble(report: Report | None, judged: Judged) -> None:
    """Report a step that is not good."""
    if report is None or judged.verdict == "good":
        return
    report.event(
        judged.step,
        "bad_step" if judged.verdict == "bad" else "spike",
        f"{'bad step' if judged.verdict == 'bad' else 'loss spike'}, {judged.answer}: {judged}",
        samples=[judged.batch.first, judged.batch.end],
        loss=judged.reading.loss,
        grad_norm=judged.reading.norm,
        parameters=judged.parameters,
        answer=judged.answer,
    )


def _tell_rollback(report: Report | None, judged: Judged, progress: Progress) -> None:
    if report is not None:
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in progress.left_out)
        text = f"rolled back from step {judged.step} to {progress.step}; left out: samples {ranges}"
        report.event(progress.step, "rollback", text, taken_back=judged.step, left_out=progress.left_out)


def _tell_saves(report: Report | None, saver: Saver, step: int) -> None:
    """Report the saves that have ended."""
    if report is None:
        return
    for news in saver.news():
        if isinstance(news, Failed):
            text = f"the checkpoint of step {news.step} could not be written: {news.error}"
            report.event(step, "save_failed", text, checkpoint=news.step, error=news.error)
        else:
            text = f"saved {news.path}: {news.bytes / 1e6:,.1f} MB in {news.seconds:.1f} s"
            size = {"bytes": news.bytes, "seconds": news.seconds}
            report.event(step, "saved", text, checkpoint=news.step, path=str(news.path), **size)


def _tell_stop(report: Report | None, guard: Guard) -> None:
    if report is not None:
        step, names = guard.progress.step, " and ".join(guard.stopped_by)
        text = f"stopped by {names} after step {step}, which is saved; the same command continues"
        report.event(step, "stopped", text, signals=guard.stopped_by)


class Meter:
    """Averages between two reports, over steps that have been judged."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.norm = nan
        self._restart()

    def _restart(self) -> None:
        self.loss = 0.0  # summed over tokens
        self.trained = 0  # tokens that went into it: those of bad steps did not
        self.tokens = 0
        self.flops = 0
        self.since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here is no training: its time does not count."""
        if self.job.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.job.mesh.device)  # steps still under way are training
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def add(self, judged: Judged) -> None:
        """Note a step."""
        batch, model = judged.batch, self.job.config.model
        tokens = batch.samples * model.sequence_length
        short = replace(model, sequence_length=model.sequence_length // batch.pieces)
        self.tokens += tokens
        self.flops += tokens * flops_per_token(short)
        self.norm = judged.reading.norm
        if judged.verdict != "bad":
            self.trained += tokens
            self.loss += judged.reading.loss * tokens

    def read(self) -> Record:
        """The mean loss per token since the last reading, the latest gradient norm and learning rate, and the speed."""
        job, seconds = self.job, time.perf_counter() - self.since
        speed = throughput(self.tokens, self.flops, seconds, job.mesh.layout.world_size, job.mesh.device)
        record = {
            "loss": self.loss / self.trained if self.trained else nan,
            "grad_norm": self.norm,
            "learning_rate": job.optimizer.param_groups[0]["lr"],
            "tokens_per_second": speed.tokens_per_second,
            "tflops_per_device": speed.tflops_per_device,
        }
        self._restart()
        return record if speed.mfu is None else {**record, "mfu": speed.mfu}
