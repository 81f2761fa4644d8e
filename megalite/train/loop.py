"""The training loop: the order of what happens in a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from megalite.base.exit_codes import ExitCode
from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.progress import Progress
from megalite.data.loader import Loader
from megalite.plan.batches import GlobalBatch, global_batches
from megalite.train.build import Job
from megalite.train.cadence import Cadence
from megalite.train.garbage import Garbage
from megalite.train.guard import Guard, Judged
from megalite.train.load_metrics import starved_text
from megalite.train.metrics import Meter, source_tokens
from megalite.train.report import Silent
from megalite.train.step import CutShort, evaluate, train_step

NOTHING_TRAINED = "no token of the batch is trained, by the masks of the data: its loss and gradients are 0"
Follower = Callable[[int, GlobalBatch, Meter, Silent], None]


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
    report: Silent,
    followers: Sequence[Follower] = (),
) -> int:
    """Train from `start` to `train.steps`, or until a rank is asked to stop. Runs on every rank; returns the exit code.

    reload: goes on from the newest checkpoint, if there is one; given a step, from the newest before that step. report:
    on ranks that do not report, a silent one. followers: called after every step that is not taken back. Raises
    Unhealthy when a guard ends the run.
    """
    last = job.config.train.steps
    guard, taken_back = Guard(job, start), None
    cadence = Cadence.of(job, report)
    with Garbage(job.config.train.gc_interval) as garbage:
        if start.step == 0:
            with garbage.pause():
                guard.stopped_by = _validate(job, batches, 0, report)
        # After a rollback, a run that was asked to stop takes another step: saved with it is what was left out.
        while guard.progress.step < last and (not guard.stopped_by or taken_back is not None):
            taken_back = _train(job, batches, saver, report, guard, cadence, garbage, followers)
            if taken_back is not None:
                job.activity("rolling back")
                with report.saves(guard.progress.step, saver):
                    saver.settle()
                guard.roll_back(taken_back, reload)
                report.rollback(taken_back, guard.progress)
    job.activity("saving")
    with report.saves(guard.progress.step, saver):
        saver.finish()
    if guard.progress.step < last:
        report.stopped(guard, start)
        return ExitCode.STOPPED
    return ExitCode.DONE


def _train(
    job: Job,
    batches: Batches,
    saver: Saver,
    report: Silent,
    guard: Guard,
    cadence: Cadence,
    garbage: Garbage,
    followers: Sequence[Follower],
) -> Judged | None:
    """Train to the end, to a request to stop, or to a step that must be taken back. Returns that step."""
    last, progress = job.config.train.steps, guard.progress
    meter = Meter(job)
    cadence.begin(progress.step, meter.training_seconds())
    job.activity("reading a batch")
    wanted = islice(global_batches(job.config, progress.samples, progress.left_out), last - progress.step)
    for step, (batch, micros) in enumerate(meter.waits(batches.train.batches(wanted)), start=progress.step + 1):
        job.activity.step = step
        job.prepare(micros)
        trained = None if micros.trained is None else micros.trained.count
        guard.watch(step, batch, train_step(job, micros, step - 1, job.activity.asked), trained)

        due = cadence.due(step, saver.local)
        if due.log:
            meter.note(step)
        for judged in guard.judge(at_once=due.waits):
            report.trouble(judged, meter.jumps(judged))
            if judged.trained == 0:
                report.event(judged.step, "nothing_trained", NOTHING_TRAINED)
            if starved := meter.add(judged):
                report.event(judged.step, "experts_starved", starved_text(starved), experts=starved)
            if judged.verdict == "bad":
                with report.saves(step, saver):
                    saver.settle()  # weights that could not be saved are the cause, and are named
            if not guard.allows(judged):
                return judged
            if meter.noted(judged.step):
                record = meter.read(judged.step) | {"tokens": guard.progress.tokens}
                report.record(judged.step, record | source_tokens(batches.train.samples, guard.progress))
                report.load(judged.step, meter.load)
        cadence.stepped(step, meter.training_seconds())
        garbage.stepped(step)
        with report.saves(step, saver):
            report.stepped(step)
        for follow in followers:
            follow(step, batch, meter, report)

        if due.evaluate:
            with meter.paused(), garbage.pause():
                guard.stopped_by = _validate(job, batches, step, report, guard.stopped_by)
        shared = due.save or bool(guard.stopped_by)
        if shared or due.save_locally:
            with meter.paused(), garbage.pause():
                job.activity("saving")
                with report.saves(step, saver), cadence.saving(step, saver, shared):
                    saver.save(guard.progress, shared)
        if guard.stopped_by:
            break
        job.activity("reading a batch")
    return None


def _validate(job: Job, batches: Batches, step: int, report: Silent, asked: tuple[str, ...] = ()) -> tuple[str, ...]:
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
        report.evaluation_cut(step, cut.asked)
        return cut.asked
    report.record(step, record)
    return ()
