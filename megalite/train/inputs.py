"""Turns a batch into what this rank runs: its part of every sequence, the positions there, and which tokens attend."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megalite.data.loader import Micros
from megalite.model.decoder import IGNORED_TARGET
from megalite.model.positions import TokenPositions, tables
from megalite.model.router import Losses
from megalite.parallel.context import attention
from megalite.parallel.fsdp import compute_dtype
from megalite.parallel.pipeline import StepInputs
from megalite.parallel.sequence import Documents, Rows, rows, split
from megalite.train.build import Job


def inputs(job: Job, batch: Micros, scale: float = 1.0, training: bool = False) -> StepInputs:
    """Return this rank's part of a step on `batch`.

    scale: see Step. training: layers may drop features. Nothing waits for the device. Losses of routers are means over
    all tokens, trained or not.
    """
    mesh, length = job.mesh, batch.shape[-1] - 1
    mine = rows(job.config.parallel.context.method, mesh.layout.cp, mesh.coordinates["cp"], length)
    sequences = batch.tokens.to(mesh.device, non_blocking=True).permute(2, 0, 1)  # s + 1, m, b
    following = sequences[1:]
    if batch.trained is not None:
        trained = batch.trained.targets.to(mesh.device, non_blocking=True).permute(2, 0, 1)
        following = following.masked_fill(~trained, IGNORED_TARGET)
    tokens, targets = (split(part, mine).transpose(0, 1).contiguous().unbind() for part in (sequences[:-1], following))
    groups = [job.mesh.cp, job.mesh.group("tp")]
    losses = Losses(1 / step_tokens(job, batch), [group for group in groups if group is not None and group.size() > 1])
    positions = _token_positions(job, batch.documents, sequences[:-1], mine, losses)
    if training and job.config.adapter is not None and job.config.adapter.dropout:
        each = zip(positions, _numbers(job, batch, mine), strict=True)
        positions = [replace(of_micro, numbers=numbers) for of_micro, numbers in each]
    return StepInputs(tokens, targets, positions, scale)


def _numbers(job: Job, batch: Micros, mine: Rows) -> Sequence[Tensor]:
    """The numbers `[s, b]` in the run of this rank's tokens of every micro-batch."""
    m, b, tokens = batch.shape
    ids = batch.ids
    if ids is None:  # as in the first step of a run
        ids = torch.arange(m * b).view(m, b) + m * b * job.mesh.dp_rank
    places = split(torch.arange(tokens - 1), mine)
    numbers = ids * (tokens - 1) + places[:, None, None]  # s m b
    return numbers.to(job.mesh.device, non_blocking=True).unbind(1)


def step_tokens(job: Job, batch: Micros) -> int:
    """Count the tokens of all ranks in a step; samples are packed, so every position has a target."""
    return batch.tokens[..., 1:].numel() * job.mesh.layout.dp


def _token_positions(
    job: Job, documents: list[list[Documents]], tokens: Tensor, mine: Rows, losses: Losses
) -> list[TokenPositions]:
    """Positions of every micro-batch of `tokens` `[s, m, b]`. Micro-batches share tensors that need no documents."""
    config, data, device = job.config, job.config.data, tokens.device
    attend = partial(attention, config.parallel.context.method, job.mesh.cp, len(tokens), device)
    plan = job.plan
    kinds = {plan.kinds[layer].attention.heads.scores for stage in job.stages for layer in plan.layers[stage]}
    kernels = {kind: job.attention[kind].kernel for kind in kinds}
    attends = [{kind: attend(kind=kind, kernel=kernel) for kind, kernel in kernels.items()}] * len(documents)
    positions: Sequence[Tensor | None] = [None] * len(documents)
    turns = split(torch.arange(len(tokens), device=device), mine)
    if data.mask_documents:
        attends = [
            {kind: attend(micro, kind=kind, kernel=kernel) for kind, kernel in kernels.items()} for micro in documents
        ]
        if data.reset_positions:
            turns = torch.arange(len(tokens), device=device)
            positions = split(positions_in_documents(documents, device), mine).unbind(1)
    angles = tables(config.model, turns, compute_dtype(config.train.dtype), len(tokens))
    return [TokenPositions(angles, *rest, losses=losses) for rest in zip(attends, positions, strict=True)]


def positions_in_documents(documents: list[list[Documents]], device: torch.device) -> Tensor:
    """The position of every token in its document: `[s, m, b]`."""
    starts = np.array([[np.repeat(sample[:-1], np.diff(sample)) for sample in micro] for micro in documents])
    positions = torch.tensor(np.arange(starts.shape[2]) - starts, pin_memory=device.type == "cuda")
    return positions.to(device, non_blocking=True).permute(2, 0, 1)
