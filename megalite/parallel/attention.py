"""Attention block by block: partial results of some queries over some keys, merged by their log-sum-exp.

The softmax of a row over all its keys is the mean of its softmaxes over blocks of keys, weighted by the blocks'
sums of exponentials (Milakov & Gimelshein 2018, arXiv 1805.02867; Liu et al. 2023, arXiv 2310.01889). Backward
needs each row's final output and log-sum-exp, and is then exact for every block by itself (Dao et al. 2022,
arXiv 2205.14135). On the CPU and on CUDA flash-attention kernels do the work; no mask is ever made.

    s  positions at hand     h  query heads          e  width of a head
    b  micro-batch           k  key-value heads      n  queries of a block, m  keys of a block
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ops = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of queries and the rows of keys that they attend to, in some samples of a micro-batch.

    Without `documents` every query attends to every key. With them both sides are the same rows, and attention is
    causal within each document: (0, …, number of rows) are the places where documents begin and end.
    """

    samples: slice
    queries: slice
    keys: slice
    documents: tuple[int, ...] = ()
    offsets: Tensor | None = None  # `documents` on the device, int32, where it is a GPU and they are several

    @property
    def pieces(self) -> list[tuple[slice, bool]]:
        """Ranges that attend to their counterparts, and whether causally."""
        return [(slice(*ends), True) for ends in pairwise(self.documents)] or [(slice(None), False)]


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """The output `[s, b, h, e]` and log-sum-exp `[b, h, s]` of queries that have seen no key, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s, b, h, _ = q.shape
    return torch.zeros_like(q, dtype=wide), q.new_full((b, h, s), -torch.inf, dtype=wide)


def attend(out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, blocks: Iterable[Block]) -> None:
    """Add what q `[s, b, h, e]` find in kv `[s', 2, b, k, e]` to the result `out`, `lse`, in place."""
    for block in blocks:
        queries, keys, values = _cut(q, kv, block)
        forward = _forward_cuda if q.is_cuda else _forward_cpu
        found, found_lse = forward(queries, keys, values, block)  # n b h e, b h n
        seen_lse = lse[block.samples, :, block.queries]
        share = torch.sigmoid(found_lse - seen_lse).permute(2, 0, 1)[..., None]
        out[block.queries, block.samples].lerp_(found.to(out.dtype), share)
        seen_lse.copy_(torch.logaddexp(seen_lse, found_lse))


def attend_backward(
    dq: Tensor, dkv: Tensor, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, blocks: Iterable[Block]
) -> None:
    """Add to `dq` and `dkv`, in place, what `blocks` owe to the gradient of the final `out`; lse is final too."""
    for block in blocks:
        rows = block.queries, block.samples
        backward = _backward_cuda if q.is_cuda else _backward_cpu
        result = grad[rows], out[rows], lse[block.samples, :, block.queries].contiguous()
        found = backward(*result, *_cut(q, kv, block), block)
        for total, part in zip(_cut(dq, dkv, block), found, strict=True):
            total += part


def _cut(q: Tensor, kv: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = kv[block.keys, :, block.samples].unbind(1)
    return q[block.queries, block.samples], keys, values


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for rows, causal in block.pieces:
        heads = _grouped(q[rows], k[rows], v[rows])
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(*heads, is_causal=causal)
        outs.append(out)
        sums.append(lse)
    out = torch.cat(outs, dim=2).permute(2, 0, 1, 3).reshape(q.shape)
    return out, torch.cat(sums, dim=2).reshape(q.shape[1], q.shape[2], -1)


def _backward_cpu(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    found = []
    lse = lse.view(-1, q.shape[2] // k.shape[2], len(q))  # b·k g n
    for rows, causal in block.pieces:
        given = *_grouped(q[rows], k[rows], v[rows]), *_grouped(out[rows], k[rows])[:1], lse[..., rows]
        given_grad = _grouped(grad[rows], k[rows])[0]
        found.append(ops._scaled_dot_product_flash_attention_for_cpu_backward(given_grad, *given, 0.0, causal))
    dq, dk, dv = (torch.cat(parts, dim=2).permute(2, 0, 1, 3) for parts in zip(*found, strict=True))  # n b·k g e
    return dq.reshape(q.shape), dk.sum(2).reshape(k.shape), dv.sum(2).reshape(v.shape)


def _grouped(q: Tensor, *kv: Tensor) -> tuple[Tensor, ...]:
    """Views with the query heads that share a kv head as heads, and all else as samples: `[b·k, g, n, e]`."""
    b_k = kv[0].shape[1] * kv[0].shape[2]
    queries = q.reshape(len(q), b_k, -1, q.shape[-1])
    shared = [x.reshape(len(x), b_k, 1, x.shape[-1]).expand(-1, -1, queries.shape[2], -1) for x in kv]
    return tuple(x.permute(1, 2, 0, 3) for x in (queries, *shared))


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    q, k, v = (_packed(x, block) for x in (q, k, v))
    out, lse, *_ = ops._flash_attention_forward(q, k, v, *_ends(q, k, block), 0.0, bool(block.documents), False)
    if block.offsets is None:
        return out.transpose(0, 1), lse
    return out[:, None], lse[None]


def _backward_cuda(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block
) -> tuple[Tensor, ...]:
    grad, out, q, k, v = (_packed(x, block) for x in (grad, out, q, k, v))
    lse = lse if block.offsets is None else lse[0]
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    given = grad, q, k, v, out, lse, *_ends(q, k, block), 0.0, bool(block.documents), *no_dropout
    grads = ops._flash_attention_backward(*given)
    return tuple(x.transpose(0, 1) if block.offsets is None else x[:, None] for x in grads)


def _packed(x: Tensor, block: Block) -> Tensor:
    """As the CUDA kernels want it: `[b, n, h, e]`, or `[n, h, e]` for several documents of one sample."""
    return x.transpose(0, 1) if block.offsets is None else x[:, 0]


def _ends(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The documents of queries and keys, and the longest."""
    if block.offsets is None:
        return None, None, q.shape[1], k.shape[1]
    longest = max(end - start for start, end in pairwise(block.documents))
    return block.offsets, block.offsets, longest, longest
