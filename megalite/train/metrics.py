"""The numbers that a run reports, under the same names on the console, in metrics.jsonl and in trackers."""

import re
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean
from typing import TypeVar

import torch

from megalite.checkpoint.store.progress import Progress
from megalite.data.samples import Samples
from megalite.optim.interface import rate_of
from megalite.plan.model.size import flops_per_token
from megalite.train.build import Job
from megalite.train.guard import Judged, is_jump
from megalite.train.load_metrics import LoadMeter
from megalite.train.vital_signs import Arriving

T = TypeVar("T")

# Dense bf16 peak in FLOP/s, from the makers' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}
CONVENTION = "MFU: model FLOPs with causal attention, recompute not counted, over the dense bf16 peak"


@dataclass(frozen=True)
class Throughput:
    """Speed of the whole job over some steps."""

    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None  # None where the peak of the device is not known


def throughput(tokens: int, flops: int, seconds: float, ranks: int, device: torch.device) -> Throughput:
    """The speed of `ranks` devices that have trained on `tokens`, with `flops` of the model, in `seconds`."""
    rate, flops_per_device = tokens / seconds, flops / seconds / ranks
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Throughput(rate, flops_per_device / 1e12, None if peak is None else flops_per_device / peak)


def peak_flops(device: str) -> float | None:
    """The peak of a device, by its marketing name: that of the longest known name all of whose words it has."""
    words = set(re.split(r"\W+", device))
    matching = [name for name in PEAK_FLOPS if words.issuperset(name.split())]
    return PEAK_FLOPS[max(matching, key=len)] if matching else None


class Meter:
    """Measures what happens between two reports, over steps that have been judged."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.norms: deque[float] = deque(maxlen=job.config.train.spike_window)  # norms of gradients, bad steps aside
        self.norm, self.jumped = nan, False
        self.paused_for = self.waited_for = 0.0  # seconds in all: of pauses, and for batches
        self.latest_wait = 0.0  # for the latest batch
        self.load = LoadMeter(job.load.layers, job.load.count)
        self._noted: dict[int, tuple[float, Arriving]] = {}  # by step: its learning rate, and the parameters' norm
        self._restart()

    def _restart(self) -> None:
        self.loss = 0.0  # summed over tokens
        self.further: list[list[float]] = [[] for _ in range(self.job.config.model.depth)]  # by token, of steps
        self.trained = 0  # tokens that went into it: those of bad steps, and untrained ones, did not
        self.masked = 0  # tokens of good steps that were not trained
        self.steps = 0
        self.tokens = 0
        self.flops = 0
        self.waited = 0.0  # seconds
        self.since = time.perf_counter()

    def training_seconds(self) -> float:
        """Seconds of a clock that stands still in pauses."""
        return time.perf_counter() - self.paused_for

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that passes inside does not count: what happens there is no training."""
        if self.job.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.job.mesh.device)  # steps still under way are training
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.since += took
        self.paused_for += took

    def waits(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and measure how long each is waited for."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            took = time.perf_counter() - began
            self.waited += took
            self.waited_for += took
            self.latest_wait = took
            yield batch

    def note(self, step: int) -> None:
        """Note the parameters after `step`, of which there is a record once that step is judged. Collective."""
        norm = self.job.gradients.parameter_norm()
        self._noted[step] = rate_of(self.job.optimizer), Arriving(norm.reshape(1))

    def noted(self, step: int) -> bool:
        """Return whether the parameters after `step` are noted."""
        return step in self._noted

    def jumps(self, judged: Judged) -> bool:
        """Return whether the gradient norm of this step is far above those before, and that of the last one was not."""
        before, self.jumped = self.jumped, is_jump(self.norms, judged.reading.norm, self.job.config.train)
        return self.jumped and not before

    def add(self, judged: Judged) -> dict[int, list[int]]:
        """Count a step that has been judged. Returns experts that starve from now on, by layer."""
        batch, model = judged.batch, self.job.config.model
        tokens = batch.samples * model.sequence_length
        short = replace(model, sequence_length=model.sequence_length // batch.pieces)
        self.steps += 1
        self.tokens += tokens
        self.flops += tokens * flops_per_token(short)
        self.norm = judged.reading.norm
        if judged.verdict == "bad":
            return {}
        self.norms.append(self.norm)
        trained = tokens if judged.trained is None else judged.trained
        self.trained += trained
        self.masked += tokens - trained
        self.loss += judged.reading.loss * trained
        for losses, loss in zip(self.further, judged.reading.further, strict=True):
            if loss:  # 0 without targets, as in the short sequences of a curriculum
                losses.append(loss)
        return self.load.add(judged.reading.load)

    def read(self, step: int) -> dict[str, float]:
        """The training values that docs/metrics.md lists, of the steps up to `step`, which is noted and judged."""
        learning_rate, arriving = self._noted.pop(step)
        job, seconds = self.job, time.perf_counter() - self.since
        speed = throughput(self.tokens, self.flops, seconds, job.mesh.layout.world_size, job.mesh.device)
        record = {
            "loss": self.loss / self.trained if self.trained else nan,
            "grad_norm": self.norm,
            "parameter_norm": arriving.read()[0],
            "learning_rate": learning_rate,
            "step_seconds": seconds / max(self.steps, 1),
            "data_wait_seconds": self.waited / max(self.steps, 1),
            "tokens_per_second": speed.tokens_per_second,
            "tflops_per_device": speed.tflops_per_device,
            "peak_memory_bytes": float(peak_memory(job.mesh.device)),
            **self.load.read(),
        }
        record |= {f"mtp_loss/{k}": fmean(losses) for k, losses in enumerate(self.further, start=1) if losses}
        if self.masked:
            record["trained_share"] = self.trained / (self.trained + self.masked)
        self._restart()
        return record if speed.mfu is None else {**record, "mfu": speed.mfu}


def source_tokens(samples: Samples, progress: Progress) -> dict[str, float]:
    """Count the tokens read, by source; empty if there is only one source."""
    if len(samples.parts) < 2:
        return {}
    counts = samples.counts(progress.samples)
    for ends in progress.left_out:
        first, end = (samples.counts(min(index, progress.samples)) for index in ends)
        counts = [count + before - after for count, before, after in zip(counts, first, end, strict=True)]
    named = zip(samples.parts, counts, strict=True)
    return {f"tokens/{part.path}": float(count * samples.sequence_length) for part, count in named}


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of tensors on a GPU since the last call, or resident in this process since it was started."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
