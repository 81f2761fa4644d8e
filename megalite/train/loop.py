"""The training loop: the order of what happens in a run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch

from megalite.checkpoint.outcomes import Failed, FailedLocally, LocalOff, Saved, SavedLocally
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.save import Saver
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.exit_codes import ExitCode
from megalite.plan.batches import GlobalBatch, global_batches
from megalite.train.build import Job
from megalite.train.cadence import Cadence, due
from megalite.train.guard import Guard, Judged
from megalite.train.metrics import Meter
from megalite.train.pace import Pace
from megalite.train.report import Record, Report
from megalite.train.step import CutShort, evaluate, train_step
from megalite.train.stragglers import Straggler, Stragglers
from megalite_launch.words import scaled


@dataclass(frozen=True)
class Batches:
    """The loaders that a run reads its batches from."""

    train: Loader
    valid: Loader | None
    valid_sources: Mapping[str, Loader] = field(default_factory=dict)  # each one alone, where there are several


def train(
    job: Job,
    batches: Batches,
    start: Progress,
    saver: Saver,
    reload: Callable[..., Progress | None],
    report: Report | None,
    pace: Pace | None = None,
    stragglers: Stragglers | None = None,
) -> int:
    """Train from `start` to `train.steps`, or until a rank is asked to stop. Runs on every rank; returns the exit code.

    reload: goes on from the newest checkpoint, if there is one; given a step, from the newest before that step. report:
    on the rank that reports. pace: there, compares step times with the prediction. stragglers: finds slow ranks. Raises
    Unhealthy when a guard ends the run.
    """
    last = job.config.train.steps
    guard, taken_back = Guard(job, start), None
    cadence = Cadence.of(job, report)
    if start.step == 0:
        guard.stopped_by = _validate(job, batches, 0, report)
    # After a rollback, a run that was asked to stop takes another step: saved with it is what was left out.
    while guard.progress.step < last and (not guard.stopped_by or taken_back is not None):
        taken_back = _train(job, batches, saver, report, guard, cadence, pace, stragglers)
        if taken_back is not None:
            job.activity("rolling back")
            with _telling_saves(report, saver, guard.progress.step):
                saver.settle()
            guard.roll_back(taken_back, reload)
            _tell_rollback(report, taken_back, guard.progress)
    job.activity("saving")
    with _telling_saves(report, saver, guard.progress.step):
        saver.finish()
    if guard.progress.step < last:
        _tell_stop(report, guard, start)
        return ExitCode.STOPPED
    return ExitCode.DONE


def _train(
    job: Job,
    batches: Batches,
    saver: Saver,
    report: Report | None,
    guard: Guard,
    cadence: Cadence,
    pace: Pace | None,
    stragglers: Stragglers | None,
) -> Judged | None:
    """Train to the end, to a request to stop, or to a step that must be taken back. Returns that step."""
    config, last, progress = job.config, job.config.train.steps, guard.progress
    meter = Meter(job)
    cadence.begin(progress.step, meter.training_seconds())
    job.activity("reading a batch")
    wanted = islice(global_batches(config, progress.samples, progress.left_out), last - progress.step)
    for step, (batch, micros) in enumerate(meter.waits(batches.train.batches(wanted)), start=progress.step + 1):
        job.activity.step = step
        job.training(micros)  # a batch of another size needs another schedule, which may take seconds to make
        guard.watch(step, batch, train_step(job, micros, step - 1, job.activity.asked))
        if stragglers is not None:
            _tell_stragglers(report, step, stragglers.stepped(meter.latest_wait))

        logs, evaluates = (due(step, section.interval, last) for section in (config.log, config.eval))
        local = config.checkpoint.local
        saves, saves_locally = cadence.due(step), local is not None and saver.local and due(step, local.interval, last)
        for judged in guard.judge(at_once=logs or evaluates or saves or saves_locally):
            _tell_trouble(report, judged, meter.jumps(judged))
            meter.add(judged)
            if judged.verdict == "bad":
                with _telling_saves(report, saver, step):
                    saver.settle()  # weights that could not be saved are the cause, and are named
            if not guard.allows(judged):
                return judged
        cadence.stepped(step, meter.training_seconds())
        if report is not None:
            report.stepped(step)
            _tell_saves(report, saver, step)
            if pace is not None:
                pace.stepped(step, batch, meter, report)

        if logs:
            record = meter.read() | {"tokens": guard.progress.tokens}
            if report is not None:
                report.record(step, record | source_tokens(batches.train.samples, guard.progress))
        if evaluates:
            with meter.paused():
                guard.stopped_by = _validate(job, batches, step, report, guard.stopped_by)
        saves = saves or bool(guard.stopped_by)
        if saves or saves_locally:
            with meter.paused():
                job.activity("saving")
                with _telling_saves(report, saver, step), cadence.saving(step, saver, shared=saves):
                    saver.save(guard.progress, shared=saves)
        if guard.stopped_by:
            break
        job.activity("reading a batch")
    return None


def _validate(
    job: Job, batches: Batches, step: int, report: Report | None, asked: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Evaluate on the first `eval.steps` batches of the validation data, the same every time.

    asked: the signals by which some rank was asked to stop before. Returns these, or those that came meanwhile. With
    any, evaluation ends early or does not begin, and there is no record.
    """
    size, steps = job.config.batch.global_, job.config.eval.steps
    if batches.valid is None or steps == 0:
        return asked
    wanted = [GlobalBatch(size * index, size) for index in range(steps)]

    def loss_on(loader: Loader) -> float:
        return evaluate(job, (micros for _, micros in loader.batches(wanted)))

    try:
        if asked:
            raise CutShort(asked)
        loss = loss_on(batches.valid)
        record = {"valid_loss": loss, "valid_perplexity": torch.tensor(loss).exp().item()}
        record |= {f"valid_loss/{name}": loss_on(loader) for name, loader in batches.valid_sources.items()}
    except CutShort as cut:
        if report is not None:
            text = f"the evaluation after step {step} is cut short by {' and '.join(cut.asked)}, and left out"
            report.event(step, "evaluation_cut", text, signals=cut.asked)
        return cut.asked
    if report is not None:
        report.record(step, record)
    return ()


def source_tokens(samples: Samples, progress: Progress) -> Record:
    """By source: how many of its tokens were read; empty if there is only one source."""
    if len(samples.parts) < 2:
        return {}
    counts = samples.counts(progress.samples)
    for ends in progress.left_out:
        first, end = (samples.counts(min(index, progress.samples)) for index in ends)
        counts = [count + before - after for count, before, after in zip(counts, first, end, strict=True)]
    named = zip(samples.parts, counts, strict=True)
    return {f"tokens/{part.path}": float(count * samples.sequence_length) for part, count in named}


def _tell_trouble(report: Report | None, judged: Judged, jumps: bool) -> None:
    """Report a step that is not good, or whose gradients are much larger than those before."""
    if report is None:
        return
    if judged.verdict == "good":
        if jumps:
            text = f"the gradient norm jumps: {judged}"
            report.event(judged.step, "grad_norm_jump", text, grad_norm=judged.reading.norm)
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


def _tell_stragglers(report: Report | None, step: int, found: list[Straggler]) -> None:
    if report is not None:
        for each in found:
            report.straggler(step, each)


def _tell_rollback(report: Report | None, judged: Judged, progress: Progress) -> None:
    if report is not None:
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in progress.left_out)
        text = f"rolled back from step {judged.step} to {progress.step}; left out: samples {ranges}"
        report.event(progress.step, "rollback", text, taken_back=judged.step, left_out=progress.left_out)


@contextmanager
def _telling_saves(report: Report | None, saver: Saver, step: int) -> Iterator[None]:
    """On leaving, in whatever way, report the saves that have ended."""
    try:
        yield
    finally:
        _tell_saves(report, saver, step)


def _tell_saves(report: Report | None, saver: Saver, step: int) -> None:
    """Report the saves that have ended."""
    if report is None:
        return
    for news in saver.news():
        match news:
            case Failed():
                text = f"the checkpoint of step {news.step} could not be written: {news.error}"
                report.event(step, "save_failed", text, checkpoint=news.step, error=news.error)
            case FailedLocally():
                text = f"the local checkpoint of step {news.step} could not be written: {news.error}"
                report.event(step, "save_local_failed", text, checkpoint=news.step, error=news.error)
            case LocalOff():
                report.event(step, "local_off", news.error, error=news.error)
            case SavedLocally():
                copies = f", and {news.replicas} copy on another node" if news.replicas else ""
                text = f"saved locally: step {news.step}, {scaled(news.bytes, 'B')}{copies} in {news.seconds:.1f} s"
                size = {"bytes": news.bytes, "seconds": news.seconds, "replicas": news.replicas}
                report.event(step, "saved_local", text, checkpoint=news.step, path=str(news.path), **size)
            case Saved():
                text = f"saved {news.path}: {scaled(news.bytes, 'B')} in {news.seconds:.1f} s"
                size = {"bytes": news.bytes, "seconds": news.seconds}
                report.event(step, "saved", text, checkpoint=news.step, path=str(news.path), **size)
                for problem in news.problems:
                    report.event(step, "save_problem", problem, checkpoint=news.step, problem=problem)


def _tell_stop(report: Report | None, guard: Guard, start: Progress) -> None:
    if report is not None:
        step, names = guard.progress.step, " and ".join(guard.stopped_by)
        saved = f"after step {step}, which is saved" if step > start.step else "before the first step"
        text = f"stopped by {names} {saved}; the same command continues"
        report.event(step, "stopped", text, signals=guard.stopped_by)
