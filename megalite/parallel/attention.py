"""Attention block by block: partial results of some queries over some keys, merged by their log-sum-exp.

The softmax of a row over all its keys is the mean of its softmaxes over blocks of keys, weighted by the blocks'
sums of exponentials (Milakov & Gimelshein 2018, arXiv 1805.02867; Liu et al. 2023, arXiv 2310.01889). Given the final
output and log-sum-exp of each row, backward computes exact gradients block by block (Dao et al. 2022,
arXiv 2205.14135). A sink is a key whose value is 0, which every row has seen before all blocks. Flash-attention kernels
compute the blocks if they can, on the CPU and on CUDA. No mask of all pairs of queries and keys is ever made.

    s  positions held here   h  query heads          e  width of a query and of a key      u  width of a value
    b  micro-batch           k  key-value heads      n  queries of a block, m  keys of a block

Keys and values travel as one tensor kv `[s, b, k, e + u]`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.config.layers import Scores
from megalite.parallel import explicit
from megalite.parallel.blocks import Block, reachable, triangles

ops = torch.ops.aten
FULL_SCORES = Scores()


class BlockKernels(NamedTuple):
    """The functions that compute the attention of a block.

    forward: from q, k, v and the block, computes the output `[n, b, h, u]` and the log-sum-exp `[b, h, n]`.
    backward: from the gradient of the output, the final output and log-sum-exp, q, k, v and the block, computes the
    gradients of q, k, v.
    parts: splits a block into the blocks that `forward` and `backward` can take.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]
    parts: Callable[[Block], list[Block]]


def empty_result(q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output `[s, b, h, u]` and log-sum-exp `[b, h, s]` of queries that have seen no key, in float32 or wider.

    sinks: `[h]`, the score that queries of each head have all the same.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    s, b, h, e = q.shape
    lse = q.new_full((b, h, s), -torch.inf, dtype=wide)
    return q.new_zeros((s, b, h, kv.shape[-1] - e), dtype=wide), lse if sinks is None else lse.copy_(sinks[:, None])


def gradient_of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of `sinks` `[h]`, from that of the output; `out` and `lse` are the final ones."""
    shares = (sinks[:, None] - lse).exp()  # b h s
    of_rows = (grad * out).sum(-1, dtype=lse.dtype).permute(1, 2, 0)
    return -(shares * of_rows).sum((0, 2)).to(sinks.dtype)


def attend(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv: Tensor,
    blocks: Iterable[Block],
    kind: Scores = FULL_SCORES,
    math: bool = False,
) -> None:
    """Merge the attention of q `[s, b, h, e]` over kv `[s', b, k, e + u]` into the result `out`, `lse`, in place.

    kind: says how scores are made; blocks have its window already. math: by plain PyTorch, whatever kernels there are.
    """
    kernels = _kernels(q, kind, math)
    for block in chain.from_iterable(map(kernels.parts, blocks)):
        found, found_lse = kernels.forward(*_cut(q, kv, block), block)  # n b h u, b h n
        seen_lse = lse[block.samples, :, block.queries]
        share = torch.sigmoid(found_lse - seen_lse).permute(2, 0, 1)[..., None]
        out[block.queries, block.samples].lerp_(found.to(out.dtype), share)
        seen_lse.copy_(torch.logaddexp(seen_lse, found_lse))


def attend_backward(
    dq: Tensor,
    dkv: Tensor,
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: Iterable[Block],
    kind: Scores = FULL_SCORES,
    math: bool = False,
) -> None:
    """Add the gradients of q and kv from `blocks` to `dq` and `dkv`, in place. `out` and `lse` are the final ones."""
    kernels = _kernels(q, kind, math)
    for block in chain.from_iterable(map(kernels.parts, blocks)):
        rows = block.queries, block.samples
        result = grad[rows], out[rows], lse[block.samples, :, block.queries].contiguous()
        _add(_cut(dq, dkv, block), kernels.backward(*result, *_cut(q, kv, block), block))


def _add(totals: Iterable[Tensor], found: Iterable[Tensor]) -> None:
    for total, part in zip(totals, found, strict=True):
        total += part


def _kernels(q: Tensor, kind: Scores, math: bool = False) -> BlockKernels:
    """FlashAttention's kernels if they can be used: they cap no scores, and on CUDA take 16-bit data types only."""
    softcap, scale = kind.softcap, kind.scale
    if math or softcap is not None or (q.is_cuda and q.element_size() > 2):
        forward = partial(explicit.forward, softcap=softcap, scale=scale)
        return BlockKernels(forward, partial(explicit.backward, softcap=softcap, scale=scale), _as_it_is)
    if q.is_cuda:
        return _padding(partial(_forward_cuda, scale=scale), partial(_backward_cuda, scale=scale), reachable)
    return _padding(partial(_forward_cpu, scale=scale), partial(_backward_cpu, scale=scale), triangles)


def _padding(
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, ...]],
    parts: Callable[[Block], list[Block]],
) -> BlockKernels:
    """Kernels that take values as wide as keys, for values of any smaller width: these are padded with 0."""

    def padded_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, _as_wide(v, k), block)
        return out[..., : v.shape[-1]], lse

    def padded_backward(
        grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block
    ) -> tuple[Tensor, ...]:
        dq, dk, dv = backward(_as_wide(grad, k), _as_wide(out, k), lse, q, k, _as_wide(v, k), block)
        return dq, dk, dv[..., : v.shape[-1]]

    return BlockKernels(padded_forward, padded_backward, parts)


def _as_wide(x: Tensor, k: Tensor) -> Tensor:
    missing = k.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _as_it_is(block: Block) -> list[Block]:
    return [block]


def _cut(q: Tensor, kv: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    e = q.shape[-1]
    keys, values = kv[block.keys, block.samples].split((e, kv.shape[-1] - e), dim=-1)
    return q[block.queries, block.samples], keys, values


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float | None = None) -> tuple[Tensor, Tensor]:
    out, heads, wide = q.new_empty(q.shape), q.shape[2], torch.promote_types(q.dtype, torch.float32)
    queries, keys, values, outs = (_grouped(x, k) for x in (q, k, v, out))
    lse = q.new_empty(*queries.shape[:3], dtype=wide)
    for rows, causal in block.pieces:
        of_piece = _mirror(block, *(x[:, :, rows] for x in (queries, keys, values)))
        found = ops._scaled_dot_product_flash_attention_for_cpu(*_shared(*of_piece), is_causal=causal, scale=scale)
        outs[:, :, rows], lse[:, :, rows] = _mirror(block, *found)
    return out, lse.view(-1, heads, len(q))


def _backward_cpu(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float | None = None
) -> tuple[Tensor, ...]:
    totals = tuple(x.new_empty(x.shape) for x in (q, k, v))
    into = [_grouped(total, k) for total in totals]
    given = [_grouped(x, k) for x in (grad, out, q, k, v)]
    given.append(lse.view(given[0].shape[:3]))
    for rows, causal in block.pieces:
        pieces = (x[:, :, rows] for x in given)
        for total, part in zip(into, _backward_of_piece(block, causal, scale, *pieces), strict=True):
            total[:, :, rows] = part
            del part  # frees its memory before the next is made
    return totals


def _backward_of_piece(block: Block, causal: bool, scale: float | None, *given: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v. Given are grad, out, q, k and v, all shaped as by `_grouped`, and lse `[b·k, g, n]`."""
    grad, out, q, k, v, lse = _mirror(block, *given)
    heads = _shared(q, k, v)
    backward = ops._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad, *heads, out, lse, 0.0, causal, scale=scale)
    return _mirror(block, dq, dk.sum(1, keepdim=True), dv.sum(1, keepdim=True))


def _mirror(block: Block, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Reverse the rows if the block is mirrored, which makes a causal triangle of an anti-causal one."""
    return tuple(x.flip(2) for x in tensors) if block.mirrored else tensors


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """A view `[b·k, g, n, e]` of heads x: the g heads that share a head of k are heads; b and k are joined."""
    return x.reshape(len(x), k.shape[1] * k.shape[2], -1, x.shape[-1]).permute(1, 2, 0, 3)


def _shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Views of grouped keys and values, one for every query head."""
    return q, *(x.expand(-1, q.shape[1], -1, -1) for x in (k, v))


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = (_packed(x, block) for x in (q, k, v))
    causal, window = bool(block.documents), _window(block)
    given = q, k, v, *_ends(q, k, block), 0.0, causal, False
    out, lse, *_ = ops._flash_attention_forward(*given, scale=scale, **window)
    if block.offsets is None:
        return out.transpose(0, 1), lse
    return out[:, None], lse[None]


def _backward_cuda(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float | None = None
) -> tuple[Tensor, ...]:
    grad, out, q, k, v = (_packed(x, block) for x in (grad, out, q, k, v))
    lse = lse if block.offsets is None else lse[0]
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    given = grad, q, k, v, out, lse, *_ends(q, k, block), 0.0, bool(block.documents), *no_dropout
    grads = ops._flash_attention_backward(*given, scale=scale, **_window(block))
    return tuple(x.transpose(0, 1) if block.offsets is None else x[:, None] for x in grads)


def _packed(x: Tensor, block: Block) -> Tensor:
    """x in the shape that CUDA kernels take: `[b, n, h, e]`, or `[n, h, e]` for several documents of one sample."""
    return x.transpose(0, 1) if block.offsets is None else x[:, 0]


def _window(block: Block) -> dict[str, int]:
    """Options of CUDA kernels: how many keys on its left and right a query attends to, without its own; −1: all."""
    if block.left is None:
        return {}
    return {"window_size_left": block.left, "window_size_right": 0 if block.documents else -1}


def _ends(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The offsets of documents among queries and among keys (None: one document), and the lengths of the longest."""
    if block.offsets is None:
        return None, None, q.shape[1], k.shape[1]
    longest = max(end - start for start, end in pairwise(block.documents))
    return block.offsets, block.offsets, longest, longest
