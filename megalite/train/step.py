"""One optimizer step and one evaluation, from batches to numbers."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megalite.optim.rate import learning_rate
from megalite.parallel.gradients import clip, finish, global_norm
from megalite.train.build import Job


def train_step(job: Job, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Optimizer step number `step`, counted from 0: the losses summed on this rank, and the global gradient norm.

    batch `[m, b, s + 1]`: this rank's micro-batches. Nothing here waits for the device.
    """
    loss = gradients(job, batch)
    norm = global_norm(job.stage, job.mesh, job.config.model.tie_embeddings)
    if job.config.optim.clip_norm > 0:
        clip(job.stage, norm, job.config.optim.clip_norm)
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate(job.config.schedule, job.config.optim.lr, job.config.train.steps, step)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return loss, norm


def gradients(job: Job, batch: Tensor) -> Tensor:
    """Accumulate the complete gradients of the mean loss; the losses summed on this rank."""
    tokens, targets = _inputs_and_targets(batch, job.mesh.device)
    loss = job.training.run(tokens, targets, 1 / job.tokens_per_step)
    finish(job.stage, job.mesh, job.config.model.tie_embeddings)
    return loss


@torch.no_grad()
def evaluate(job: Job, batches: Iterable[Tensor]) -> float:
    """Mean loss per token over whole global batches."""
    total, count = torch.zeros((), dtype=torch.float64, device=job.mesh.device), 0
    for batch in batches:
        tokens, targets = _inputs_and_targets(batch, job.mesh.device)
        total += job.evaluation.run(tokens, targets, 1.0)
        count += 1
    for module in job.stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # no backward comes to free what forward gathered
    return mean_loss(job, total / count)


def mean_loss(job: Job, loss: Tensor) -> float:
    """The mean loss per token of a step, from the sums on all ranks. Waits for the device."""
    at = job.mesh.coordinates
    counted = at["pp"] == job.mesh.layout.pp - 1 and at["tp"] == 0  # tp ranks hold the same sum
    total = loss.clone() if counted else torch.zeros_like(loss)
    dist.all_reduce(total, group=job.mesh.world)
    return total.item() / job.tokens_per_step


def _inputs_and_targets(batch: Tensor, device: torch.device) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Tokens and the tokens that follow them, sequence first: `[m, b, s + 1]` → m of `[s, b]` each."""
    batch = batch.to(device, non_blocking=True).transpose(1, 2)
    return batch[:, :-1].contiguous().unbind(), batch[:, 1:].contiguous().unbind()
