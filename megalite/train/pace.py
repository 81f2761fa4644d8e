"""Compares the first hundred steps of a start with the time that the planner predicts, and says what may be slower.

It runs on the reporting rank and reads clocks only. Nothing in it can end a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median, quantiles

import torch

from megalite.config.schema import Config
from megalite.cost.predict import Prediction, predict
from megalite.cost.texts import PARTS, step_text
from megalite.plan.batches import GlobalBatch
from megalite.train.build import Job
from megalite.train.folder.records import WARM_UP_STEPS
from megalite.train.metrics import Meter
from megalite.train.order_costs import cluster_of_run
from megalite.train.report import Silent
from megalite_launch.base.texts import seconds_text

COMPARISON_STEPS = 100  # steps of a start after which, or at its end, the comparison is made
MIN_STEPS = 3  # steps that a median is taken of
MIN_WAIT_SHARE = 0.3  # share of the missing seconds that waiting must have to be named as the cause
TAIL_RATIO = 1.25  # how much longer than the median the slowest tenth of steps takes where something disturbs them
SUSPECT_SHARE = 0.2  # share of the predicted step from which on a part is suspected to be the slow one
RETRY_RATE = 0.1  # times a step that the allocator may give memory back and ask anew
SUSPECTS = {  # parts of a prediction, and what makes each slower than predicted
    "tensor": "look at the links inside a node (nvidia-smi topo -m), and keep parallel.tp inside of it",
    "context": "look at the links between these ranks, or try another parallel.context.method",
    "experts": "look at the links between ranks of parallel.ep, or try a smaller parallel.ep",
    "data": "look at the network (NCCL_DEBUG=INFO tells what NCCL uses), or use a larger batch.global",
    "bubble": "a rank or a stage may be slower than the others; compare the ranks' GPUs, or use more micro-batches",
    "host": "the CPU may be slow or busy; use train.compile=true or a larger batch.micro, and a core for every rank",
    "offload": "look at the connection between GPU and host memory",
}


@dataclass(frozen=True)
class MeasuredPace:
    """Steps of one start, in seconds each. waits: for batches. retries: of the allocator, per step. on: the device."""

    seconds: tuple[float, ...]
    waits: tuple[float, ...]
    retries: float
    on: str = "cuda"

    @property
    def median(self) -> float:
        return median(self.seconds)


class Pace:
    """Follows the steps of one start, up to its comparison."""

    def __init__(self, prediction: Prediction, first: int, device: torch.device) -> None:
        self.prediction, self._device = prediction, device
        config = prediction.config
        self._began, self._last = first, min(first + COMPARISON_STEPS, config.train.steps)
        self._whole = config.batch.global_  # only steps of whole batches are compared
        self._seconds: list[float] = []
        self._waits: list[float] = []
        self._before: tuple[Meter, float, float] | None = None  # meter of the step before, and its times after it
        self._retries = _retries(device)

    @staticmethod
    def of(job: Job, first: int, report: Silent) -> "Pace | None":
        """Return the Pace of a start at step `first`; None if no cluster is named or known, or no time predicted."""
        device = job.mesh.device
        with _harmless(report):
            cluster = cluster_of_run(job.config, device)
            if cluster is None or first >= job.config.train.steps:
                return None
            prediction = predict(job.config, cluster, plan=job.plan)
            report.say(f"expected on {prediction.cluster.name}: {step_text(prediction)} a step")
            return Pace(prediction, first, device)
        return None

    def stepped(self, step: int, batch: GlobalBatch, meter: Meter, report: Silent) -> None:
        """Note the step that has just been taken; after the last of them, report the comparison."""
        if step > self._last:
            return
        with _harmless(report):
            self._note(step, batch, meter)
            if step == self._last and len(self._seconds) >= MIN_STEPS:
                retries = (_retries(self._device) - self._retries) / len(self._seconds)
                _tell(
                    step,
                    self.prediction,
                    MeasuredPace(tuple(self._seconds), tuple(self._waits), retries, self._device.type),
                    report,
                )

    def _note(self, step: int, batch: GlobalBatch, meter: Meter) -> None:
        at, waited = meter.training_seconds(), meter.waited_for
        before, self._before = self._before, (meter, at, waited)
        if before is None or before[0] is not meter:  # a rollback has made another one
            return
        if step == self._began + WARM_UP_STEPS:
            self._retries = _retries(self._device)
        elif step > self._began + WARM_UP_STEPS and (batch.samples, batch.pieces) == (self._whole, 1):
            self._seconds.append(at - before[1])
            self._waits.append(waited - before[2])


@contextmanager
def _harmless(report: Silent) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever fails here, training goes on
        report.say(f"step times are not compared with a prediction: {str(error) or type(error).__name__}")


def _retries(device: torch.device) -> int:
    """Number of times that the allocator has given memory back and asked for it again, which takes long."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def _tell(step: int, prediction: Prediction, measured: MeasuredPace, report: Silent) -> None:
    verdict, cause = judged(prediction, measured)
    text = (
        f"step time {seconds_text(measured.median)} (median of {len(measured.seconds)} steps up to step {step}), "
        f"expected {seconds_text(prediction.low)} – {seconds_text(prediction.high)} on {prediction.cluster.name}: "
    )
    report.event(
        step,
        "pace",
        text + (f"{verdict}; {cause}" if cause else verdict),
        verdict=verdict,
        cause=cause,
        cluster=prediction.cluster.name,
        steps=len(measured.seconds),
        measured=measured.median,
        predicted=prediction.seconds,
        low=prediction.low,
        high=prediction.high,
        data_wait=mean(measured.waits),
    )


def judged(prediction: Prediction, measured: MeasuredPace) -> tuple[str, str]:
    """The verdict, `as expected`, `faster` or `slower`; and for the last two a possible explanation, else ""."""
    if measured.median < prediction.low:
        return "faster", "megalite-calibrate-cluster fits the cluster's file to runs"
    if measured.median <= prediction.high:
        return "as expected", ""
    return "slower", f"probably {_cause(prediction, measured)}"


def _cause(prediction: Prediction, measured: MeasuredPace) -> str:
    """The probable cause of slow steps, with advice: a measured cause first, then a known one, then a suspected one."""
    if measured.on != "cuda":
        return f"the {measured.on.upper()}, as the prediction is for {prediction.cluster.gpu.name}"
    config, waited = prediction.config, mean(measured.waits)
    if waited >= MIN_WAIT_SHARE * (measured.median - prediction.seconds):
        advice = "put the token stores on a faster disk, or leave the host more free cores"
        return f"waiting for data, {seconds_text(waited)} of a step: {advice}"
    if measured.retries > RETRY_RATE:
        advice = "use a smaller batch.micro or train.recompute"
        often = f"{measured.retries:.1f} times a step"
        return f"memory that is nearly full, so that the allocator starts anew {often}: {advice}"
    if slow := _known_slow(config):
        return f"{slow}, which the prediction does not count"
    slowest = quantiles(measured.seconds, n=10)[-1]
    if slowest > TAIL_RATIO * measured.median:
        advice = "look for other work on the nodes, the network or the disk"
        return f"something beside training: the slowest tenth of steps take over {seconds_text(slowest)}; {advice}"
    parts = prediction.parts
    suspect = max(SUSPECTS, key=lambda kind: parts[kind])
    if parts[suspect] > SUSPECT_SHARE * prediction.seconds:
        share = parts[suspect] / prediction.seconds
        return f"{PARTS[suspect]}, predicted to take {share:.0%} of a step: {SUSPECTS[suspect]}"
    advice = "look for heat, power limits and other processes (nvidia-smi -q -d PERFORMANCE); if all GPUs are alike, "
    return f"the GPU's own work: {advice}megalite-calibrate-cluster fits the cluster's file to runs"


def _known_slow(config: Config) -> str:
    """Settings that are known to be slow; "" if there are none."""
    if config.train.deterministic:
        return "train.deterministic"
    kernels = config.kernels_by_operation
    unused = [("muon", config.optim.name != "muon"), ("experts", config.model.experts is None)]
    as_fast = ["adamw", *(name for name, is_unused in unused if is_unused)]
    slow = [name for name, chosen in vars(kernels).items() if chosen == "torch" and name not in as_fast]
    return f"PyTorch's kernels of {', '.join(slow)} in place of Triton's" if slow else ""
