"""The training loop: what happens in a run, in order."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import store
from megalite.data.loader import Loader
from megalite.plan.batches import GlobalBatch, global_batches
from megalite.plan.size import flops_per_token
from megalite.train.build import Job
from megalite.train.metrics import throughput
from megalite.train.report import Record, Report
from megalite.train.step import evaluate, mean_loss, target_tokens, train_step


@dataclass(frozen=True)
class Batches:
    """Where a run's batches come from."""

    train: Loader
    valid: Loader | None


def train(job: Job, batches: Batches, start: store.Progress, checkpoints: Path, report: Report | None) -> None:
    """Train from `start` to `train.steps`, on every rank; `report` on the one that reports."""
    config, last = job.config, job.config.train.steps
    if start.step == 0:
        _validate(job, batches, 0, report)
    meter = Meter(job)
    wanted = islice(global_batches(config, start.samples), max(0, last - start.step))
    for step, (batch, micros) in enumerate(batches.train.batches(wanted), start=start.step + 1):
        loss, norm = train_step(job, micros, step - 1)
        meter.add(loss, micros)
        if report is not None:
            report.stepped(step)

        if _due(step, config.log.interval, last):
            record = meter.read(norm) | {"tokens": batch.end * config.model.sequence_length}
            if report is not None:
                report.record(step, record)
        if _due(step, config.eval.interval, last):
            with meter.paused():
                _validate(job, batches, step, report)
        if _due(step, config.checkpoint.interval, last):
            with meter.paused():
                progress = store.Progress(step, batch.end, asdict(config.model))
                path = store.save(checkpoints, job.stages, job.optimizer, progress)
                if report is not None:
                    store.retain(checkpoints, config.checkpoint.keep)
                    report.say(f"saved {path}")


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


class Meter:
    """Averages between two reports; touches the device only when it is read."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._restart()

    def _restart(self) -> None:
        self.losses: list[Tensor] = []
        self.tokens: list[int] = []
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

    def add(self, loss: Tensor, batch: Tensor) -> None:
        """Note a step on `batch`, as `train_step` takes it, and this rank's part of its mean loss."""
        tokens, model = target_tokens(self.job, batch), self.job.config.model
        self.losses.append(loss)
        self.tokens.append(tokens)
        self.flops += tokens * flops_per_token(replace(model, sequence_length=batch.shape[2] - 1))

    def read(self, norm: Tensor) -> Record:
        """The mean loss per token since the last reading, the latest gradient norm and learning rate, and the speed."""
        job, tokens = self.job, sum(self.tokens)
        losses = torch.stack(self.losses)
        weights = torch.tensor(self.tokens, dtype=losses.dtype, device=losses.device) / tokens
        loss = mean_loss(job, losses @ weights)
        seconds = time.perf_counter() - self.since
        speed = throughput(tokens, self.flops, seconds, job.mesh.layout.world_size, job.mesh.device)
        self._restart()
        record = {
            "loss": loss,
            "grad_norm": norm.item(),
            "learning_rate": job.optimizer.param_groups[0]["lr"],
            "tokens_per_second": speed.tokens_per_second,
            "tflops_per_device": speed.tflops_per_device,
        }
        return record if speed.mfu is None else {**record, "mfu": speed.mfu}
