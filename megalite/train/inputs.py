"""Turns a batch into what this rank runs: its part of every sequence, the positions there, and which tokens attend."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megalite.config.layers import Rotation, Scores
from megalite.config.schema import Config
from megalite.data.loader import Micros
from megalite.model.decoder import IGNORED_TARGET
from megalite.model.mtp import Ahead
from megalite.model.positions import Angles, TokenPositions, tables
from megalite.model.router import Losses
from megalite.parallel.context import Attention, attention
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
    tokens, targets = (_by_micro_batch(part, mine, job.config) for part in (sequences[:-1], following))
    groups = [job.mesh.cp, job.mesh.group("tp")]
    losses = Losses(1 / step_tokens(job, batch), [group for group in groups if group is not None and group.size() > 1])
    positions = _token_positions(job, batch.documents, sequences[:-1], mine, losses)
    if training and job.config.adapter is not None and job.config.adapter.dropout:
        each = zip(positions, _numbers(job, batch, mine), strict=True)
        positions = [replace(of_micro, numbers=numbers) for of_micro, numbers in each]
    if training and job.config.model.mtp is not None:
        return StepInputs(tokens, _ahead(job, batch, sequences, following, mine, scale), positions, scale)
    return StepInputs(tokens, targets, positions, scale)


def _by_micro_batch(x: Tensor, mine: Rows, config: Config) -> Sequence[Tensor]:
    """Select this rank's rows of every micro-batch of x `[s, m, b]`.

    They are `[s, b]`, or `[b·s, 1]` where samples are joined.
    """
    x = split(x, mine)
    if config.joins_samples:
        return x.permute(1, 2, 0).flatten(1).unsqueeze(2).unbind()
    return x.transpose(0, 1).contiguous().unbind()


def _ahead(job: Job, batch: Micros, sequences: Tensor, following: Tensor, mine: Rows, scale: float) -> list[Ahead]:
    """Inputs and targets of multi-token prediction, for every micro-batch.

    sequences: tokens `[s + 1, m, b]`. following: targets `[s, m, b]` of the next token. A token further ahead counts
    where it does as the next one, and where all tokens before it are of one document, if documents are masked. The
    losses of each layer are divided by the number of its own targets in the step.
    """
    mtp, device = job.config.model.mtp, sequences.device
    assert mtp is not None
    places = positions_in_documents(batch.documents, device) if job.config.data.mask_documents else None
    tokens, targets = _shifted(sequences, following, places, mtp.depth)
    tokens, targets = split(tokens, mine), split(targets, mine)  # s D m b, s 1+D m b
    counts = targets[:, 1:].ne(IGNORED_TARGET).sum((0, 2, 3))
    if any(job.mesh.coordinates[axis] for axis in ("pp", "tp")):  # these ranks hold what others count
        counts.zero_()
    dist.all_reduce(counts, group=job.mesh.world)
    wide = torch.promote_types(compute_dtype(job.config.train.dtype), torch.float32)
    shares = 1 / counts.clamp(min=1).double()
    factors = mtp.weight / mtp.depth / scale * shares
    scales = torch.cat((factors.new_ones(1), factors)).to(wide)
    if job.config.joins_samples:
        tokens, targets = (x.permute(3, 0, 1, 2).flatten(0, 1).unsqueeze(3) for x in (tokens, targets))
    rows, b = len(targets), targets.shape[3]
    scales = scales[:, None].expand(rows, -1, b).flatten(1)
    each = zip(tokens.unbind(2), targets.unbind(2), strict=True)
    return [Ahead(ids.flatten(1), wanted.flatten(1), scales, shares) for ids, wanted in each]


def _shifted(sequences: Tensor, following: Tensor, places: Tensor | None, depth: int) -> tuple[Tensor, Tensor]:
    """Tokens `[s, D, m, b]` that layers of multi-token prediction take, and the targets `[s, 1+D, m, b]` of all.

    places: of the s tokens in their documents, where these count; None: all are of one.
    """
    length = len(following)

    def padded(part: Tensor, value: int) -> Tensor:
        return F.pad(part, (0, 0, 0, 0, 0, length - len(part)), value=value)

    tokens, targets = [], [following]
    for k in range(1, depth + 1):
        tokens.append(padded(sequences[k : k + length], 0))
        further = following[k:]
        if places is not None:
            further = further.masked_fill(places[k:] != places[:-k] + k, IGNORED_TARGET)
        targets.append(padded(further, IGNORED_TARGET))
    return torch.stack(tokens, 1), torch.stack(targets, 1)


def _numbers(job: Job, batch: Micros, mine: Rows) -> Sequence[Tensor]:
    """The numbers in the run of this rank's tokens of every micro-batch, which lie as tokens do."""
    m, b, tokens = batch.shape
    ids = batch.ids
    if ids is None:  # as in the first step of a run
        ids = torch.arange(m * b).view(m, b) + m * b * job.mesh.dp_rank
    numbers = ids * (tokens - 1) + torch.arange(tokens - 1)[:, None, None]  # s m b
    return _by_micro_batch(numbers.to(job.mesh.device, non_blocking=True), mine, job.config)


def step_tokens(job: Job, batch: Micros) -> int:
    """Count the tokens of all ranks in a step; samples are packed, so every position has a target."""
    return batch.tokens[..., 1:].numel() * job.mesh.layout.dp


def _token_positions(
    job: Job, documents: list[list[Documents]], tokens: Tensor, mine: Rows, losses: Losses
) -> list[TokenPositions]:
    """Positions of every micro-batch of `tokens` `[s, m, b]`. Micro-batches share tensors that need no documents."""
    config, data, device, length = job.config, job.config.data, tokens.device, len(tokens)
    if not data.mask_documents:
        if length not in job.positions:  # the latest is enough, as for runners
            angles = _angles(job, split(torch.arange(length, device=device), mine), length)
            job.positions = {length: TokenPositions(angles, _attention(job, length, device))}
        return [replace(job.positions[length], losses=losses)] * len(documents)
    joint, turns = config.joins_samples, torch.arange(length, device=device)
    attends = [_attention(job, length, device, documents=micro, joint=joint) for micro in documents]
    positions: Sequence[Tensor | None] = [None] * len(documents)
    if data.reset_positions:
        positions = _by_micro_batch(positions_in_documents(documents, device), mine, config)
    else:
        turns = split(turns, mine).repeat(tokens.shape[2] if joint else 1)
    angles = _angles(job, turns, length)
    return [TokenPositions(angles, *rest, losses=losses) for rest in zip(attends, positions, strict=True)]


def _attention(job: Job, length: int, device: torch.device, **of_micro: Any) -> dict[Scores, Attention]:
    """The attention of every kind of layer here, over sequences of `length`. of_micro: as for `attention`."""
    method, plan = job.config.parallel.context.method, job.plan
    kinds = {plan.kinds[layer].attention.heads.scores for stage in job.stages for layer in plan.layers[stage]}
    attend = partial(attention, method, job.mesh.cp, length, device, **of_micro)
    return {kind: attend(kind=kind, kernel=job.attention[kind].kernel) for kind in kinds}


def _angles(job: Job, turns: Tensor, length: int) -> dict[Rotation, Angles]:
    """The tables of angles at positions `turns` of sequences of `length`."""
    return tables(job.config.model, turns, compute_dtype(job.config.train.dtype), length)


def positions_in_documents(documents: list[list[Documents]], device: torch.device) -> Tensor:
    """The position of every token in its document: `[s, m, b]`."""
    starts = np.array([[np.repeat(sample[:-1], np.diff(sample)) for sample in micro] for micro in documents])
    positions = torch.tensor(np.arange(starts.shape[2]) - starts, pin_memory=device.type == "cuda")
    return positions.to(device, non_blocking=True).permute(2, 0, 1)
