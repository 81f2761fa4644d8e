"""One optimizer step and one evaluation, from batches to numbers."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.optim.rate import learning_rate
from megalite.parallel.fsdp import reshard
from megalite.parallel.gradients import clip, finish, global_norm
from megalite.train.build import Job
from megalite.train.inputs import inputs


def train_step(job: Job, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Optimizer step number `step`, counted from 0: this rank's part of the mean loss, and the global gradient norm.

    batch `[m, b, s + 1]`: this rank's micro-batches. Nothing here waits for the device.
    """
    loss = gradients(job, batch)
    return loss, update(job, step)


def gradients(job: Job, batch: Tensor) -> Tensor:
    """Accumulate the complete gradients of the mean loss; this rank's part of it."""
    scale = 1 / target_tokens(job, batch)
    loss = job.training(batch).run(inputs(job, batch, scale))
    finish(job.stages, job.placement, job.mesh, job.config.model.tie_embeddings)
    return loss * scale


def update(job: Job, step: int) -> Tensor:
    """Use up the gradients for optimizer step number `step`; their global norm."""
    norm = global_norm(job.stages, job.placement, job.mesh, job.config.model.tie_embeddings)
    if job.config.optim.clip_norm > 0:
        clip(job.stages, norm, job.config.optim.clip_norm)
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate(job.config.schedule, job.config.optim.lr, job.config.train.steps, step)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return norm


@torch.no_grad()
def evaluate(job: Job, batches: Iterable[Tensor]) -> float:
    """Mean loss per token over whole global batches."""
    total, tokens = torch.zeros((), dtype=torch.float64, device=job.mesh.device), 0
    for batch in batches:
        total += job.evaluation(batch).run(inputs(job, batch))
        tokens += target_tokens(job, batch)
    for stage in job.stages.values():
        reshard(stage)  # no backward comes to free what forward gathered
    return mean_loss(job, total / tokens)


def mean_loss(job: Job, loss: Tensor) -> float:
    """The mean loss per token, from the parts of all ranks. Waits for the device."""
    at = job.mesh.coordinates
    counted = at["pp"] == job.placement[-1] and at["tp"] == 0  # tp ranks hold the same sum
    total = loss.clone() if counted else torch.zeros_like(loss)
    dist.all_reduce(total, group=job.mesh.world)
    return total.item()


def target_tokens(job: Job, batch: Tensor) -> int:
    """Target tokens of all ranks in a step; samples are packed, so every position has a target."""
    return batch[..., 1:].numel() * job.mesh.layout.dp
