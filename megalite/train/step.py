"""One optimizer step and one evaluation, from batches to numbers."""

from collections import deque
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.data.loader import Micros
from megalite.optim.interface import set_rate
from megalite.optim.rate import learning_rate
from megalite.parallel.fsdp import reshard
from megalite.train.build import Job
from megalite.train.inputs import inputs, step_tokens
from megalite.train.vital_signs import Asked, Signs, ask_all, left_under_way, take_signs
from megalite_kernels.grad_norm import clip_coefficient


def train_step(job: Job, batch: Micros, step: int, asked: Collection[int] = ()) -> Signs:
    """Take optimizer step number `step`, counted from 0. Returns its vital signs.

    batch: this rank's micro-batches. asked: signals by which this rank was asked to stop, for all to
    know. Where the loss or the gradient norm is not finite, nothing changes. Nothing here waits for the device.
    """
    return update(job, gradients(job, batch), step, asked)


def gradients(job: Job, batch: Micros) -> Tensor:
    """Accumulate the complete gradients of the mean loss. Returns this rank's part of that loss.

    Where no target of the global batch is trained, the loss and its gradients are 0.
    """
    scale = 1 / max(1, target_tokens(job, batch))
    job.load.begin()
    with job.casts.once():
        loss = job.training(batch).run(inputs(job, batch, scale, training=True))
    job.activity("finishing the gradients")
    job.gradients.finish()
    return loss * scale


def update(job: Job, loss: Tensor, step: int, asked: Collection[int] = ()) -> Signs:
    """Use up the gradients for optimizer step number `step`. Returns its vital signs.

    loss: this rank's part of the mean loss.
    """
    with job.clock.timed("optimizer"):
        return _update(job, loss, step, asked)


def _update(job: Job, loss: Tensor, step: int, asked: Collection[int]) -> Signs:
    job.activity("updating the weights")
    own_loss, load, further = loss if _counts_loss(job) else None, job.load.counted(job.mesh.device), _further(job)
    signs = take_signs(job.mesh, *job.gradients.counted_norms(), own_loss, asked, load, further)
    limit = job.config.optim.clip_norm
    job.optimizer.clip = clip_coefficient(signs.norm, limit) if limit > 0 else None
    job.optimizer.found_inf = signs.bad  # skips the update where it is 1
    config = job.config
    set_rate(job.optimizer, learning_rate(config.schedule, config.optim.lr, config.train.steps, step))
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.load.correct(signs.load, signs.bad)
    return signs


class CutShort(Exception):
    """An evaluation has ended early, on all ranks: some rank was asked to stop, by the signals `asked`."""

    def __init__(self, asked: tuple[str, ...]) -> None:
        super().__init__(*asked)
        self.asked = asked


@torch.no_grad()
def evaluate(job: Job, batches: Iterable[Micros]) -> float:
    """Mean loss per trained token over whole global batches; nan if none is trained. Raises CutShort."""
    total, tokens = torch.zeros((), dtype=torch.float64, device=job.mesh.device), 0
    under_way: deque[Asked] = deque()
    asked: tuple[str, ...] = ()
    for batch in batches:
        with job.casts.once():
            total += job.evaluation(batch).run(inputs(job, batch))
        tokens += target_tokens(job, batch)
        job.activity("evaluating")
        under_way.append(ask_all(job.mesh, job.activity.asked))
        if len(under_way) > left_under_way(job.mesh) and (asked := under_way.popleft().read()):
            break
    for stage in job.stages.values():
        reshard(stage)  # no backward comes to free what forward gathered
    if asked:
        raise CutShort(asked)
    loss = total / tokens if _counts_loss(job) else torch.zeros_like(total)
    dist.all_reduce(loss, group=job.mesh.world)
    return loss.item()


def _further(job: Job) -> Tensor | None:
    """Parts of this rank in the mean losses of tokens further ahead in the step; None: none are predicted."""
    if not job.config.model.depth:
        return None
    found = torch.zeros(job.config.model.depth, dtype=torch.float64, device=job.mesh.device)
    for stage in job.stages.values():
        if stage.head is not None and stage.head.further is not None:
            if _counts_loss(job):
                found += stage.head.further
            stage.head.further = None
    return found


def _counts_loss(job: Job) -> bool:
    """Return whether this rank's part of the mean loss, 0 where no stage has one, is one of those that add up to it."""
    return job.mesh.coordinates["tp"] == 0  # tp ranks hold the same sum


def target_tokens(job: Job, batch: Micros) -> int:
    """Count the targets of all ranks that a step's loss is the mean over."""
    return step_tokens(job, batch) if batch.trained is None else batch.trained.count
