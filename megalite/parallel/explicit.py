"""Attention over a block in plain PyTorch, where flash kernels cannot be used: capped scores, fp32 or fp64 on CUDA.

With s = scale · q · k, scores are cap · tanh(s / cap) (Gemma 2, arXiv 2408.00118, §2), or s without a cap. The scale is
1/√e unless another is given. Backward uses the final log-sum-exp L and output o of the rows, as flash attention does
(Dao et al. 2022, arXiv 2205.14135, appendix B.2):

    P = exp(score − L)     dV = Pᵀ dO     dS = P ∘ (dO Vᵀ − rowsum(dO ∘ o)) ∘ (1 − tanh²(s / cap))

All is computed in float32 or wider. Scores are made for a few rows of queries at a time.

    n  queries     b  micro-batch        h  query heads                  g  query heads of a key-value head
    m  keys        e  width of a head    k  key-value heads              r  rows of queries at a time
    u  width of a value
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megalite.parallel.blocks import Block
from megalite.plan.parts.attention_memory import MAX_SCORES, ROWS


def forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, softcap: float | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output `[n, b, h, u]` and log-sum-exp `[b, h, n]` of q `[n, b, h, e]` over k `[m, b, k, e]`, v `[m, b, k, u]`."""
    keys, values = (_by_head(x, k)[:, 0] for x in (k, v))
    out = keys.new_empty(*q.shape[:-1], v.shape[-1])
    lse = keys.new_empty(q.shape[1], q.shape[2], len(q))
    scale = _scale(q) if scale is None else scale
    for rows, columns, hidden in _steps(block, q, k):
        scores, _ = _scores(_by_head(q[rows], k), keys[:, columns], hidden, softcap, scale)
        sums = scores.logsumexp(-1)
        found = _times(scores.sub_(sums[..., None]).exp_(), values[:, columns])
        del scores  # before there are others
        out[rows] = found.permute(2, 0, 1, 3).reshape(out[rows].shape)
        lse[..., rows] = sums.reshape(lse[..., rows].shape)
    return out, lse


def backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    softcap: float | None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v; grad and out are `[n, b, h, u]`, and lse `[b, h, n]`."""
    keys, values = (_by_head(x, k)[:, 0] for x in (k, v))
    dq, dk, dv = torch.empty_like(q, dtype=keys.dtype), torch.zeros_like(keys), torch.zeros_like(values)
    scale = _scale(q) if scale is None else scale
    for rows, columns, hidden in _steps(block, q, k):
        queries, grads, outs = (_by_head(x[rows], k) for x in (q, grad, out))
        scores, bent = _scores(queries, keys[:, columns], hidden, softcap, scale)
        weights = scores.sub_(lse[..., rows].reshape(scores.shape[:-1])[..., None]).exp_()
        dv[:, columns] += weights.flatten(1, 2).mT @ grads.flatten(1, 2)
        dscores = _times(grads, values[:, columns].mT).sub_((grads * outs).sum(-1, keepdim=True)).mul_(weights)
        del scores, weights  # before there are others
        if bent is not None:
            dscores.addcmul_(dscores, bent.square_(), value=-1)
        dscores.mul_(scale)
        dq[rows] = _times(dscores, keys[:, columns]).permute(2, 0, 1, 3).reshape(dq[rows].shape)
        dk[:, columns] += dscores.flatten(1, 2).mT @ queries.flatten(1, 2)
        del dscores, bent
    return dq, dk.transpose(0, 1).reshape(k.shape), dv.transpose(0, 1).reshape(v.shape)


def _by_head(x: Tensor, k: Tensor) -> Tensor:
    """`[n, b, h, e]` as `[b·k, g, n, e]`, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.reshape(len(x), k.shape[1] * k.shape[2], -1, x.shape[-1]).permute(1, 2, 0, 3).to(wide).contiguous()


def _scores(
    queries: Tensor, keys: Tensor, hidden: Tensor | None, softcap: float | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The scores `[b·k, g, r, m]`, −∞ for hidden keys, and with a cap also tanh(s / cap)."""
    scores, bent = _times(queries, keys.mT).mul_(scale), None
    if softcap is not None:
        bent = scores.div_(softcap).tanh_()
        scores = bent * softcap
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), bent


def _times(x: Tensor, y: Tensor) -> Tensor:
    """x `[b·k, g, r, i]` times y `[b·k, i, j]`."""
    return (x.flatten(1, 2) @ y).unflatten(1, x.shape[1:3])


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _steps(block: Block, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yields rows of queries, the range of keys that they attend to, and a mask of keys hidden from single rows."""
    ends = [(begin, end, begin, end) for begin, end in pairwise(block.documents)] or [(0, len(q), 0, len(k))]
    for begin, end, first, last in ends:
        shift = last - end  # from a query to the key at its position
        longest = last - first
        if block.documents and block.left is not None:
            longest = min(longest, block.left + ROWS)
        step = max(1, min(ROWS, MAX_SCORES // (longest * q.shape[1] * q.shape[2])))
        for start in range(begin, end, step):
            stop = min(start + step, end)
            start_of_keys = first if block.left is None else max(first, start + shift - block.left)
            keys = range(start_of_keys, min(last, stop + shift) if block.documents else last)
            hidden = _hidden(block, range(start + shift, stop + shift), keys, q.device)
            yield slice(start, stop), slice(keys.start, keys.stop), hidden


def _hidden(block: Block, places: range, keys: range, device: torch.device) -> Tensor | None:
    """A mask of keys that the query at each of `places` does not attend to; None if all attend to all."""
    if block.left is None and not block.documents:
        return None
    at, key = (torch.arange(rows.start, rows.stop, device=device) for rows in (places, keys))
    after = key > at[:, None] if block.documents else None
    if block.left is None:
        return after
    before = key < at[:, None] - block.left
    return before if after is None else before | after
