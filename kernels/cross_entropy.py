"""Cross-entropy over a vocabulary that may be split over ranks.

loss = logsumexp(logits) − logits[target]. Each rank holds the logits of its own tokens of the vocabulary;
the ranks exchange two numbers per row, the log-sum-exp of their part and the target's logit if they own
it, in one all-gather. Only the log-sum-exp is kept, and the gradient softmax − onehot is written over the
logits in backward (compare Megatron-LM, arXiv 1909.08053, §3, which needs three all-reduces).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite_kernels.collectives import all_gather_single

ROWS = 128  # rows handled at a time: temporaries stay in cache, and small beside the logits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        width = logits.shape[1]
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
        local = targets - rank * width
        owned = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)

        wide = torch.promote_types(logits.dtype, torch.float32)
        stats = torch.empty(2, len(logits), dtype=wide, device=logits.device)
        for rows in _blocks(len(logits)):
            stats[0, rows] = torch.logsumexp(logits[rows].to(wide), dim=1)
        stats[1] = logits.gather(1, local[:, None])[:, 0].to(wide).masked_fill(~owned, 0)
        if ranks > 1:
            parts = stats.new_empty(ranks, *stats.shape)
            all_gather_single(parts.view(-1, stats.shape[1]), stats, group=group)
            stats = torch.stack((parts[:, 0].logsumexp(0), parts[:, 1].sum(0)))
        # Raising here would make the host wait for the device.
        stats[0].masked_fill_((targets < 0) | (targets >= ranks * width), math.nan)

        ctx.logits, ctx.lse, ctx.local, ctx.owned = logits, stats[0], local, owned
        return (stats[0] - stats[1]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, lse, local, owned = ctx.logits, ctx.lse, ctx.local, ctx.owned
        if logits is None:
            raise RuntimeError("cross_entropy: its backward has run and overwrote the logits; run forward again")
        ctx.logits = None
        for rows in _blocks(len(logits)):
            block = logits[rows]
            part = block.to(lse.dtype).sub_(lse[rows, None]).exp_()  # in place where logits are as wide
            part.scatter_add_(1, local[rows, None], -owned[rows, None].to(part.dtype)).mul_(grad)
            if part is not block:
                block.copy_(part)
        return logits.detach(), None, None


def _blocks(count: int) -> list[slice]:
    return [slice(start, min(start + ROWS, count)) for start in range(0, count, ROWS)]


def cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over rows of the cross-entropy, in float32 or wider.

    logits `[n, v/t]`: this rank's equal, contiguous part of the vocabulary; backward overwrites them, so
    nothing else may use them. targets `[n]`: token ids over the whole vocabulary, the same on every rank
    of `group`; there is no index to ignore, and an id outside the vocabulary makes the loss and its row's
    gradient nan. Every rank returns the same sum, and its backward, which runs once, needs no communication.
    """
    return _CrossEntropy.apply(logits, targets, group)
