"""Attention within documents and windows over whole sequences on CUDA: FlashAttention, with no copies around it.

Every query has all of its keys in one call of a kernel, so no partial results are merged. Samples that are cut into the
same documents, or into none, are given as further heads of one sequence: the layout `[s, b, h, e]` needs no copy for
that. Samples with documents of their own are a call each, on views; only results are copied, next to each other. A step
joins samples with documents where it can (`Config.joins_samples`), so that there is one.

    s  length     h  query heads        e  width of a head
    b  samples    k  key-value heads    g  groups of samples with the same documents: 1 or b
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.attention import gradient_of_sinks

ops = torch.ops.aten
Ends = tuple[Tensor | None, Tensor | None, int, int]


class Packed:
    """Causal attention within documents and a window. The offsets of documents are made once, for all layers.

    documents: the positions at which documents begin, and the length, of every sample; None: samples are whole.
    """

    def __init__(
        self,
        documents: Sequence[tuple[int, ...]] | None,
        window: int | None,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        self.left, self.scale = -1 if window is None else window - 1, scale
        self.offsets: Tensor | None = None
        self.ends: Tensor | None = None
        if documents is not None:
            groups = documents if len(set(documents)) > 1 else documents[:1]
            length, pin = documents[0][-1], device.type == "cuda"
            # Layers are compiled for shapes and numbers: those of every batch are alike, and the host reads a tensor.
            offsets = torch.full((len(groups), length + 1), length, dtype=torch.int32, pin_memory=pin)
            for row, cuts in zip(offsets, groups, strict=True):
                row[: len(cuts)] = torch.tensor(cuts)
            self.offsets = offsets.to(device, non_blocking=True)
            self.ends = torch.tensor([[len(cuts), max(b - a for a, b in pairwise(cuts))] for cuts in groups])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q `[s, b, h, e]`, k and v `[s, b, k, e]`, sinks `[h]` → `[s, b, h, e]`."""
        out: Tensor
        out, _ = packed_attention(q, k, v, sinks, self.offsets, self.ends, self.left, self.scale)
        return out


# Custom operations do not break the graph of a compiled layer, which cannot look into them.
@torch.library.custom_op("megalite::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    offsets: Tensor | None,
    ends: Tensor | None,
    left: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The output `[s, b, h, e]` and log-sum-exp `[b, h, s]`, sinks included.

    offsets: where documents begin, and the length, `[g, s + 1]`. ends: for each group how many offsets it has, without
    those after the length, and how long its longest document is, `[g, 2]` on the host. left: the keys before its own
    that a query attends to; −1: all.
    """
    tokens, ends_of = [_by_call(x, ends) for x in (q, k, v)], _ends(offsets, ends, len(q))
    found = [
        ops._flash_attention_forward(*given, *documents, 0.0, True, False, scale=scale, **_window(left))
        for *given, documents in zip(*tokens, ends_of, strict=True)
    ]
    outs, sums, *_ = zip(*found, strict=True)
    out, lse = _joined(outs, 1, q.shape), _joined(sums, 0, (q.shape[1], q.shape[2], len(q)))
    if sinks is not None:
        keys, lse = lse, torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
        out.mul_((keys - lse).exp_().permute(2, 0, 1)[..., None])
    return out, lse


@torch.library.custom_op("megalite::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor | None,
    ends: Tensor | None,
    left: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and sinks; the last is empty where there are none."""
    of_sinks = q.new_empty(0) if sinks is None else gradient_of_sinks(sinks, grad, out, lse)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    tokens = [*(_by_call(x, ends) for x in (grad, q, k, v, out)), _sums_by_call(lse, ends)]
    found = [
        ops._flash_attention_backward(*given, *documents, 0.0, True, *no_dropout, scale=scale, **_window(left))
        for *given, documents in zip(*tokens, _ends(offsets, ends, len(q)), strict=True)
    ]
    dq, dk, dv = zip(*found, strict=True)
    return _joined(dq, 1, q.shape), _joined(dk, 1, k.shape), _joined(dv, 1, v.shape), of_sinks


@packed_attention.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    s, b, h, _width = q.shape
    return q.new_empty(q.shape), q.new_empty(b, h, s, dtype=torch.promote_types(q.dtype, torch.float32))


@packed_attention_backward.register_fake
def _shapes_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, offsets, ends, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, offsets, ends)
    ctx.has_sinks = sinks is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *found, of_sinks = packed_attention_backward(grad, *ctx.saved_tensors, *ctx.how)
    return *found, of_sinks if ctx.has_sinks else None, None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_keep)


def _by_call(x: Tensor, ends: Tensor | None) -> Sequence[Tensor]:
    """Heads of one token after another, `[s, b·h/g, e]` for each group; without documents `[1, s, b·h, e]`."""
    if ends is None:
        return (x.reshape(1, len(x), -1, x.shape[-1]),)
    return x.reshape(len(x), len(ends), -1, x.shape[-1]).unbind(1)


def _sums_by_call(lse: Tensor, ends: Tensor | None) -> Sequence[Tensor]:
    """Log-sum-exps by call, `[b·h/g, s]` for each group; without documents `[1, b·h, s]`."""
    if ends is None:
        return (lse.reshape(1, -1, lse.shape[-1]),)
    return lse.reshape(len(ends), -1, lse.shape[-1]).unbind()


def _joined(parts: Sequence[Tensor], dim: int, shape: Sequence[int]) -> Tensor:
    """The results of all calls in one tensor: a copy only where there are several, which lie along `dim`."""
    return (parts[0] if len(parts) == 1 else torch.stack([*parts], dim)).reshape(shape)


def _ends(offsets: Tensor | None, ends: Tensor | None, length: int) -> list[Ends]:
    """The offsets of documents among queries and among keys, and the lengths of the longest, by group."""
    if offsets is None or ends is None:
        return [(None, None, length, length)]
    groups = zip(offsets, ends.tolist(), strict=True)
    return [(row[:count], row[:count], longest, longest) for row, (count, longest) in groups]


def _window(left: int) -> dict[str, int]:
    """Options of kernels: how many keys on its left and right a query attends to, without its own; −1: all."""
    return {"window_size_left": left, "window_size_right": 0 if left >= 0 else -1}
