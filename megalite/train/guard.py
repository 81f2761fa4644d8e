"""The guards of a run: how the vital signs judge a step, and what follows from that.

All ranks see the same numbers and take the same decisions.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import FrameType
from typing import Literal

import torch.distributed as dist

from megalite.base.errors import Unhealthy
from megalite.base.stop_signals import Handler, listen
from megalite.checkpoint.store.progress import Progress
from megalite.config.schema import Config, Train
from megalite.distributed.mesh import Mesh
from megalite.plan.batches import GlobalBatch, joined, latest_batches
from megalite.train.build import Job
from megalite.train.vital_signs import Reading, Signs, left_under_way

Verdict = Literal["good", "bad", "spike"]
MIN_LOSSES = 8  # losses that a spike can be told from
DEVIATION_FACTOR = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
MAX_BAD_STEPS = 8  # bad steps in a row with which no run ends well
MIN_DEVIATION = 0.005  # least standard deviation of losses, as a share of their median
MAX_LISTED = 8  # names of parameters that each rank tells, and that are shown


@dataclass(frozen=True)
class Judged:
    """A step, and how it was judged."""

    step: int
    batch: GlobalBatch
    reading: Reading
    verdict: Verdict
    answer: str  # the configured response; "": none
    parameters: tuple[str, ...] = ()  # names of some whose gradients are not finite, in a bad step
    trained: int | None = None  # tokens that the loss is the mean over; None: all of the batch

    def __str__(self) -> str:
        numbers = f"loss {self.reading.loss:.4g}, gradient norm {self.reading.norm:.4g}"
        at = f"step {self.step}, samples {self.batch.first} to {self.batch.end - 1}: {numbers}"
        return f"{at}; not finite: the gradients of {_shown(self.parameters)}" if self.parameters else at


def is_spike(losses: Sequence[float], loss: float, train: Train) -> bool:
    """Return whether `loss` is far above the `losses` before it."""
    return _out_of_line(losses, loss, train, MIN_DEVIATION)


def is_jump(norms: Sequence[float], norm: float, train: Train) -> bool:
    """Return whether a gradient norm is far above the `norms` before it, and more than twice their median."""
    return _out_of_line(norms, norm, train, 1 / train.spike_threshold)


def _out_of_line(before: Sequence[float], value: float, train: Train, floor: float) -> bool:
    """Return whether `value` exceeds the median of `before` by more than `train.spike_threshold` standard deviations.

    The standard deviation is estimated from the median absolute deviation, and taken to be at least `floor` of the
    median. The answer is False until a quarter of the window is there.
    """
    if len(before) < max(MIN_LOSSES, train.spike_window // 4):
        return False
    middle = median(before)
    deviation = DEVIATION_FACTOR * median(abs(other - middle) for other in before)
    return value > middle + train.spike_threshold * max(deviation, floor * abs(middle))


def judge(progress: Progress, reading: Reading, train: Train) -> Verdict:
    """The verdict on the step after `progress`."""
    if not reading.finite:
        return "bad"
    return "spike" if train.on_spike != "ignore" and is_spike(progress.losses, reading.loss, train) else "good"


def advanced(progress: Progress, judged: Judged, config: Config) -> Progress:
    """The progress of the run after a step. A bad step takes its samples and changes nothing else."""
    step = replace(progress, step=judged.step, samples=judged.batch.end)
    if judged.answer in ("stop", "skip", "rollback"):
        step = replace(step, bad_steps=step.bad_steps + 1)
    if judged.verdict == "bad":
        return step
    return replace(
        step,
        updates=step.updates + 1,
        tokens=step.tokens + judged.batch.samples * config.model.sequence_length,
        losses=(*step.losses, judged.reading.loss)[-config.train.spike_window :],
    )


def rolled_back(saved: Progress, progress: Progress, judged: Judged, config: Config) -> Progress:
    """The progress of the run when one of its steps is taken back and `saved` is loaded.

    From then on, the samples of that step and of `train.rollback_skip` − 1 steps before it are left out.
    """
    known = joined((*saved.left_out, *progress.left_out))
    batches = latest_batches(config, saved.samples, known, judged.batch.end, config.train.rollback_skip)
    return replace(saved, left_out=joined((*known, batches)), bad_steps=progress.bad_steps)


class Requests:
    """Signals that ask this rank to stop after the step under way. A second SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: set[int] = set()

    def listen(self) -> dict[int, Handler]:
        """Note signals from now on, in the main thread. Returns the handlers from before."""
        return listen(self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in self.received:
            raise KeyboardInterrupt
        self.received.add(number)


class Guard:
    """Follows a run step by step: `progress` is that after the latest step that was judged.

    On a GPU, the vital signs of a step are read while the next step runs, so that the host never waits for the device.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.progress = progress
        self.stopped_by: tuple[str, ...] = ()  # signals that any rank was sent
        self._config, self._train, self._mesh = job.config, job.config.train, job.mesh
        self._checkpoint, self._began = job.config.checkpoint, progress.step
        self._under_way: deque[tuple[int, GlobalBatch, Signs, int | None]] = deque()
        self._in_a_row = 0  # bad steps, up to the latest
        self._taken_back, self._from = 0, 0  # the latest rollback: the step taken back, and that of the checkpoint

    def watch(self, step: int, batch: GlobalBatch, signs: Signs, trained: int | None = None) -> None:
        """Note that a step was launched. trained: tokens that its loss is the mean over; None: all of the batch."""
        self._under_way.append((step, batch, signs, trained))

    def judge(self, at_once: bool) -> Iterator[Judged]:
        """Judge steps whose vital signs have arrived, oldest first; all, with `at_once` or after a request to stop.

        Collective if a step is bad.
        """
        while len(self._under_way) > (0 if at_once or self.stopped_by else left_under_way(self._mesh)):
            step, batch, signs, trained = self._under_way.popleft()
            reading = signs.read()
            verdict = judge(self.progress, reading, self._train)
            answer = {"good": "", "bad": self._train.on_bad_step, "spike": self._train.on_spike}[verdict]
            parameters = _offending(self._mesh, signs) if verdict == "bad" else ()
            judged = Judged(step, batch, reading, verdict, answer, parameters, trained)
            self.progress = advanced(self.progress, judged, self._config)
            self._in_a_row = self._in_a_row + 1 if verdict == "bad" else 0
            self.stopped_by = self.stopped_by or reading.asked
            yield judged

    def allows(self, judged: Judged) -> bool:
        """Return whether the run goes on; else the step must be taken back. Raises Unhealthy if the run must end."""
        if judged.answer == "stop":
            raise Unhealthy(f"{judged}; use train.on_bad_step=skip or rollback to go past it")
        if judged.answer not in ("skip", "rollback"):
            return True
        if self.progress.bad_steps > self._train.max_bad_steps:
            limit = f"train.max_bad_steps = {self._train.max_bad_steps}"
            raise Unhealthy(
                f"{judged}; this is bad step {self.progress.bad_steps} of the run, and {limit} allows no more"
            )
        if judged.step == self._train.steps and self._in_a_row >= min(MAX_BAD_STEPS, judged.step - self._began):
            raise Unhealthy(
                f"{judged}; the last {self._in_a_row} steps of the run were all bad, so it has not ended well"
            )
        return judged.answer == "skip"

    def roll_back(self, judged: Judged, reload: Callable[[int | None], Progress | None]) -> None:
        """Go on from the checkpoint that `reload` loads, without the samples of `judged`.

        If the run has failed no later than it did before the latest rollback, that is a checkpoint older than the one
        of that rollback. Raises Unhealthy if there is none.
        """
        before = self._from if judged.step <= self._taken_back else None
        saved = reload(before)
        if saved is None:
            raise Unhealthy(f"{judged}; {self._no_way_back(before)}")
        self._taken_back, self._from, self._in_a_row = judged.step, saved.step, 0
        self._under_way.clear()
        self.progress = rolled_back(saved, self.progress, judged, self._config)

    def _no_way_back(self, before: int | None) -> str:
        if before is not None:
            return f"going on from step {before} has failed again, and there is no checkpoint before it"
        weights = self._checkpoint.weights
        began = f" (checkpoint.weights = {weights} is none of this run: it has no moments)" if weights else ""
        return f"there is no checkpoint yet to roll back to{began}: choose a lower checkpoint.interval"


def _offending(mesh: Mesh, signs: Signs) -> tuple[str, ...]:
    """Parameters whose gradients are not finite, the first ones of every rank. Collective."""
    told: list[list[str]] = [[] for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(told, signs.offending()[:MAX_LISTED], group=mesh.world)
    return tuple(dict.fromkeys(name for names in told for name in names))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (" and others" if len(names) > MAX_LISTED else "")
