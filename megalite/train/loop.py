"""The training loop: what happens in a run, in order."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import store
from megalite.data.loader import Loader
from megalite.train.build import Job
from megalite.train.metrics import throughput
from megalite.train.report import Record, Report
from megalite.train.step import evaluate, mean_loss, train_step


@dataclass(frozen=True)
class Batches:
    """Where a run's batches come from."""

    train: Loader
    valid: Loader | None


def train(job: Job, batches: Batches, start: store.Progress, checkpoints: Path, report: Report | None) -> None:
    """Train from `start` to `train.steps`, on every rank; `report` on the one that reports."""
    config, samples = job.config, start.samples
    last = config.train.steps
    if start.step == 0:
        _validate(job, batches, 0, report)
    meter = Meter(job)
    for step, batch in enumerate(batches.train.batches(samples, last - start.step), start=start.step + 1):
        loss, norm = train_step(job, batch, step - 1)
        samples += config.batch.global_
        meter.add(loss)
        if report is not None:
            report.stepped(step)

        if _due(step, config.log.interval, last):
            record = meter.read(norm)
            if report is not None:
                report.record(step, record)
        if _due(step, config.eval.interval, last):
            with meter.paused():
                _validate(job, batches, step, report)
        if _due(step, config.checkpoint.interval, last):
            with meter.paused():
                progress = store.Progress(step, samples, asdict(config.model))
                path = store.save(checkpoints, job.stages, job.optimizer, progress)
                if report is not None:
                    store.retain(checkpoints, config.checkpoint.keep)
                    report.say(f"saved {path}")


def _due(step: int, interval: int, last: int) -> bool:
    """Every `interval` steps, and at the end; 0: at the end only."""
    return step == last or (interval > 0 and step % interval == 0)


def _validate(job: Job, batches: Batches, step: int, report: Report | None) -> None:
    """Evaluate on the first `eval.steps` batches of the validation data, the same every time."""
    if batches.valid is None or job.config.eval.steps == 0:
        return
    loss = evaluate(job, batches.valid.batches(0, job.config.eval.steps))
    if report is not None:
        report.record(step, {"valid_loss": loss, "valid_perplexity": torch.tensor(loss).exp().item()})


class Meter:
    """Averages between two reports; touches the device only when it is read."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._restart()

    def _restart(self) -> None:
        self.losses: list[Tensor] = []
        self.since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here is no training: its time does not count."""
        if self.job.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.job.mesh.device)  # steps still under way are training
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss)

    def read(self, norm: Tensor) -> Record:
        """The mean loss since the last reading, the latest gradient norm and learning rate, and the speed."""
        job, steps = self.job, len(self.losses)
        loss = mean_loss(job, torch.stack(self.losses).mean())
        seconds = time.perf_counter() - self.since
        speed = throughput(
            job.config.model, steps * job.tokens_per_step, seconds, job.mesh.layout.world_size, job.mesh.device
        )
        self._restart()
        record = {
            "loss": loss,
            "grad_norm": norm.item(),
            "learning_rate": job.optimizer.param_groups[0]["lr"],
            "tokens_per_second": speed.tokens_per_second,
            "tflops_per_device": speed.tflops_per_device,
        }
        return record if speed.mfu is None else {**record, "mfu": speed.mfu}
