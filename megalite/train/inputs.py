"""From a batch to what this rank runs: its part of every sequence, the positions there, and who attends to whom."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megalite.data.documents import boundaries
from megalite.model.positions import Places, angles
from megalite.parallel.context import attention
from megalite.parallel.fsdp import compute_dtype
from megalite.parallel.pipeline import Step
from megalite.parallel.sequence import Documents, Rows, rows, split
from megalite.train.build import Job


def inputs(job: Job, batch: Tensor, scale: float = 1.0) -> Step:
    """This rank's part of a step on `batch` `[m, b, s + 1]`, whose targets are the tokens that follow.

    scale: see Step. The batch is on the host, which looks for documents in it; nothing waits for the device.
    """
    mesh, length = job.mesh, batch.shape[-1] - 1
    mine = rows(job.config.parallel.context.method, mesh.layout.cp, mesh.coordinates["cp"], length)
    sequences = batch.to(mesh.device, non_blocking=True).permute(2, 0, 1)  # s + 1, m, b
    tokens, targets = (
        split(part, mine).transpose(0, 1).contiguous().unbind() for part in (sequences[:-1], sequences[1:])
    )
    return Step(tokens, targets, _places(job, batch, sequences[:-1], mine), scale)


def _places(job: Job, batch: Tensor, tokens: Tensor, mine: Rows) -> list[Places]:
    """Of every micro-batch of `tokens` `[s, m, b]`; what does not depend on tokens is there once for all."""
    config, data, device = job.config, job.config.data, tokens.device
    attend = partial(attention, config.parallel.context.method, job.mesh.cp, len(tokens), device)
    attends = [attend()] * len(batch)
    positions: Sequence[Tensor | None] = [None] * len(batch)
    turns = split(torch.arange(len(tokens), device=device), mine)
    if data.mask_documents:
        end = data.end_of_document
        assert end is not None, "the worker has asked the tokenizer"
        attends = list(map(attend, documents_of(batch, end)))
        if data.reset_positions:
            turns = torch.arange(len(tokens), device=device)
            positions = split(positions_in_documents(tokens, end), mine).unbind(1)
    cos, sin = angles(config.model, turns, compute_dtype(config.train.precision))
    return [Places(cos, sin, *rest) for rest in zip(attends, positions, strict=True)]


def documents_of(batch: Tensor, end_of_document: int) -> list[list[Documents]]:
    """Of every micro-batch and sample in `batch` `[m, b, s + 1]`: where documents begin, and s."""
    return [[boundaries(sample, end_of_document) for sample in micro] for micro in batch.numpy()[..., :-1]]


def positions_in_documents(tokens: Tensor, end_of_document: int) -> Tensor:
    """Of every token of `[s, …]` in its document, which begins after an end-of-document token."""
    positions = torch.arange(len(tokens), device=tokens.device).view(-1, *[1] * (tokens.dim() - 1))
    begins = torch.cat((torch.zeros_like(tokens[:1]), tokens[:-1])).eq(end_of_document)
    return positions - torch.where(begins, positions, 0).cummax(0).values
