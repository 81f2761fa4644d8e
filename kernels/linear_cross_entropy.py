"""The last linear layer and cross-entropy in one operation, which makes the logits of many tokens chunk by chunk.

For each chunk of tokens, forward computes logits = x·Wᵀ, their losses and gradient g as in `cross_entropy`, and then at
once dx = g·W and dW += gᵀ·x, after which the logits can be freed (after Hsu et al. 2024, arXiv 2410.10989, §3.2). The
gradient of the loss is not known in forward, so backward multiplies dx and dW by it. The last chunk's logits are kept
for backward, as separate layers would keep theirs. So with a single chunk, the cost is that of separate layers. A
single chunk is used if the logits of all tokens take no more memory than several chunks and the float32 dW.

Each chunk reads and writes dW, kept in float32, so small chunks are slow. If ranks split the vocabulary, each chunk
needs one all-gather, which overlaps with computing the next chunk's logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from megalite_kernels.backend import Backend, use_triton, wide_dtype
from megalite_kernels.collectives import group_named, name_of
from megalite_kernels.cross_entropy import (
    gather_stats,
    launch_gradient,
    launch_merge,
    launch_stats,
    torch_gradient,
    torch_merge,
    torch_stats,
)
from megalite_kernels.cross_entropy import reference as reference_of_logits
from megalite_kernels.labels import Labels, labels_of

MIN_CHUNK_TOKENS = 4096  # tokens of a chunk: with fewer, the time to sum dW in float32 shows beside the matrix products
TILE_TOKENS = 128  # tokens of a matrix product's tile
CHUNK_CLASSES = 1024  # whose logits are widened at a time, if they must be


def reference(x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The loss over the whole vocabulary. options: those of `cross_entropy.reference`."""
    wide = wide_dtype(x.dtype)
    return reference_of_logits(x.to(wide) @ weight.to(wide).T, targets, **options)


def chunk_tokens(
    tokens: int, width: int, columns: int, dtype: torch.dtype, ranks: int = 1, memory: int | None = None
) -> int:
    """The number of tokens per chunk. All chunks have about the same size.

    Logits take at most `memory` bytes; if ranks split the vocabulary, this includes two chunks at a time. The default
    of `memory` is the size of the weight `[columns, width]`, but a chunk may always have 4096 tokens. By default, all
    tokens are one chunk if its logits take no more memory than those of several chunks plus the float32 sum of dW,
    which one chunk needs for a wide gradient alone. All ranks must choose the same number. So `columns` is the same for
    all ranks, and free memory is not considered.
    """
    token = columns * dtype.itemsize
    buffers = 2 if ranks > 1 else 1
    if memory is None:
        most = max(width // buffers, MIN_CHUNK_TOKENS)
        if tokens * token <= buffers * most * token + columns * width * wide_dtype(dtype).itemsize:
            most = max(tokens, 1)
    else:
        most = max(memory // (buffers * token), 1)
    chunks = max(-(-tokens // most), 1)
    even = max(-(-tokens // chunks), 1)
    return min(-(-even // TILE_TOKENS) * TILE_TOKENS, most)


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def has_gpu_products(x: Tensor) -> bool:
    """Return whether products with `x` are a GPU's, which adds them to wider sums without copies.

    Where memory is counted, with tensors that have no data, it is a GPU's.
    """
    return x.is_cuda or isinstance(x, FakeTensor)


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: int = 1, alpha: float = 1.0) -> None:
    """total = beta·total + alpha·a·b, rounded only to the data type of `total`, which may be wider than a's and b's."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
    elif has_gpu_products(total):
        if total.is_cuda:  # without data, there is nothing to add
            torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, alpha=alpha, out=total)
    else:  # a CPU has no such product; wide copies of all logits would take more memory
        wide = b.to(total.dtype)
        for rows in _chunks(len(a), CHUNK_CLASSES):
            torch.addmm(total[rows], a[rows].to(total.dtype), wide, beta=beta, alpha=alpha, out=total[rows])


def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup | None, chunk: int, triton: bool,
    wants_dx: bool, wants_dw: bool, labels: Labels,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss; dx and the sum of dW of all chunks but the last; the logits and log-sum-exps of the last chunk.

    Tensors that are not wanted are empty. With one chunk, dx and dW are empty too.
    """
    merge, gradient = (launch_merge, launch_gradient) if triton else (torch_merge, torch_gradient)
    wants, chunks = wants_dx or wants_dw, _chunks(len(x), chunk)
    loss, dx, dw, last, last_lses = _outputs(x, weight, chunk, wants_dx, wants_dw, buffers=False)
    loss.zero_()
    one = torch.ones_like(loss)
    for tokens, logits, parts, gathering in _logits(x, weight, targets, chunks, group, triton, labels):
        if gathering is not None:
            gathering.wait()
        losses, lses = merge(parts, targets[tokens], labels)
        loss += losses.sum()
        if not wants:
            continue
        if tokens == chunks[-1]:
            last, last_lses = logits, lses
            break
        gradient(logits, targets[tokens], lses, one.expand(len(logits)), labels)
        if wants_dx:
            torch.mm(logits, weight, out=dx[tokens])
        if wants_dw:
            add_product(dw, logits.T, x[tokens], beta=int(tokens.start > 0))
    return loss, dx, dw, last, last_lses


def _logits(
    x: Tensor, weight: Tensor, targets: Tensor, chunks: list[slice], group: dist.ProcessGroup | None, triton: bool,
    labels: Labels,
) -> Iterator[tuple[slice, Tensor, Tensor, Any]]:  # fmt: skip
    """Yields every chunk's tokens, logits, stats of all ranks, and the work to wait for before the stats may be read.

    If there is work to wait for, the next chunk's logits are computed first. Otherwise all chunks use one buffer.
    """
    size = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    buffers = [x.new_empty(size, len(weight)) for _ in chunks[: 1 if group is None else 2]]
    stats_of = launch_stats if triton else torch_stats
    begun = []
    for number, tokens in enumerate(chunks):
        logits = buffers[number % len(buffers)][: tokens.stop - tokens.start]
        torch.mm(x[tokens], weight.T, out=logits)
        stats = stats_of(logits, targets[tokens], labels)
        begun.append((tokens, logits, *gather_stats(stats, group, async_op=True)))
        if len(begun) == len(buffers):
            yield begun.pop(0)
    yield from begun


def _outputs(
    x: Tensor, weight: Tensor, chunk: int, wants_dx: bool, wants_dw: bool, buffers: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of `_forward` as tensors without values; without `buffers`, those of the last chunk are empty."""
    wide, early = wide_dtype(x.dtype), _early(len(x), chunk)
    kept = len(x) - early if buffers and (wants_dx or wants_dw) else 0
    return (
        x.new_empty((), dtype=wide),
        x.new_empty(len(x) if wants_dx and early else 0, x.shape[1]),
        x.new_empty(len(weight) if wants_dw and early else 0, x.shape[1], dtype=wide),
        x.new_empty(kept, len(weight)),
        x.new_empty(kept, dtype=wide),
    )


def _early(tokens: int, chunk: int) -> int:
    """The number of tokens in all chunks but the last."""
    return max(tokens - 1, 0) // chunk * chunk


def _backward(
    scale: Tensor, x: Tensor, weight: Tensor, targets: Tensor, dx: Tensor, dw: Tensor, last: Tensor, lses: Tensor,
    triton: bool, wants_dx: bool, wants_dw: bool, wide: bool, labels: Labels,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the weight, from the saved tensors.

    Empty if unwanted, if `dx` holds that of x, or if `dw` holds that of the weight, as it does where that is `wide`.
    """
    early = len(x) - len(last)
    # With one chunk, the scaled gradient is rounded once; with several, their sum is scaled as a whole.
    of_last = torch.ones_like(scale) if early else scale
    gradient = launch_gradient if triton else torch_gradient
    gradient(last, targets[early:], lses, of_last.expand(len(last)), labels)
    new_dx, all_dw = _gradients_like(x, weight, early, wants_dx, wants_dw, wide)
    if wants_dx:
        torch.mm(last, weight, out=(dx if early else new_dx)[early:])
        if early:
            dx *= scale
    if wants_dw and early:
        add_product(dw, last.T, x[early:])
        torch.mul(dw, scale, out=dw if wide else all_dw)
    elif wants_dw:
        add_product(all_dw, last.T, x, beta=0)
    return new_dx, all_dw


def _gradients_like(
    x: Tensor, weight: Tensor, early: int, wants_dx: bool, wants_dw: bool, wide: bool
) -> tuple[Tensor, Tensor]:
    of_weight = wide_dtype(x.dtype) if wide else weight.dtype
    return (
        torch.empty_like(x) if wants_dx and not early else x.new_empty(0),
        torch.empty_like(weight, dtype=of_weight) if wants_dw and not (wide and early) else weight.new_empty(0),
    )


class _TorchLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup | None, chunk: int,
        wants_dx: bool, wants_dw: bool, wide: bool, labels: Labels,
    ) -> Tensor:  # fmt: skip
        loss, *ctx.kept = _forward(x, weight, targets, group, chunk, False, wants_dx, wants_dw, labels)
        ctx.save_for_backward(x, weight, targets)
        ctx.options = False, wants_dx, wants_dw, wide, labels
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError(
                "linear_cross_entropy: its backward has run and overwrote what it needs; run forward again"
            )
        kept, ctx.kept = ctx.kept, None
        gradients = _backward(scale, *ctx.saved_tensors, *kept, *ctx.options)
        return *_both(kept[0], kept[1], *gradients, *ctx.options[1:4]), *(None,) * 7


def _both(
    dx: Tensor, dw: Tensor, new_dx: Tensor, new_dw: Tensor, wants_dx: bool, wants_dw: bool, wide: bool
) -> tuple[Tensor | None, ...]:
    """The gradients for autograd. With several chunks, that of x is in `dx`, and a wide one of the weight in `dw`."""
    of_x, of_weight = dx.detach() if len(dx) else new_dx, dw.detach() if wide and len(dw) else new_dw
    return of_x if wants_dx else None, of_weight if wants_dw else None


@torch.library.custom_op("megalite::linear_cross_entropy", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, targets: Tensor, group: str, chunk: int, triton: bool, wants_dx: bool, wants_dw: bool,
    wide: bool, first: int, columns: int, vocabulary: int, ignore_index: int | None, smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    labels = Labels(first, columns, vocabulary, ignore_index, smoothing, z_loss)
    return _forward(x, weight, targets, group_named(group), chunk, triton, wants_dx, wants_dw, labels)


@_op.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, group: str, chunk: int, triton: bool, wants_dx: bool, wants_dw: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(x, weight, chunk, wants_dx, wants_dw)


@torch.library.custom_op("megalite::linear_cross_entropy_backward", mutates_args=("dx", "dw", "last"))
def _backward_op(
    scale: Tensor, x: Tensor, weight: Tensor, targets: Tensor, dx: Tensor, dw: Tensor, last: Tensor, lses: Tensor,
    triton: bool, wants_dx: bool, wants_dw: bool, wide: bool,
    first: int, columns: int, vocabulary: int, ignore_index: int | None, smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    labels = Labels(first, columns, vocabulary, ignore_index, smoothing, z_loss)
    return _backward(scale, x, weight, targets, dx, dw, last, lses, triton, wants_dx, wants_dw, wide, labels)


@_backward_op.register_fake
def _(
    scale: Tensor, x: Tensor, weight: Tensor, targets: Tensor, dx: Tensor, dw: Tensor, last: Tensor, lses: Tensor,
    triton: bool, wants_dx: bool, wants_dw: bool, wide: bool, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _gradients_like(x, weight, len(x) - len(last), wants_dx, wants_dw, wide)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, targets, _, _, *options = inputs
    ctx.save_for_backward(x, weight, targets, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros instead of missing gradients would take as much memory
    ctx.options = options


@once_differentiable
def _gradients(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, targets, dx, dw, *kept = ctx.saved_tensors
    found = _backward_op(scale, x, weight, targets, dx, dw, *kept, *ctx.options)
    return *_both(dx, dw, *found, *ctx.options[1:4]), *(None,) * 13


_op.register_autograd(_gradients, setup_context=_save)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
    columns: range | None = None,
    memory: int | None = None,
    wide_gradient: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """`cross_entropy(x @ weight.T, targets, …)`, whose logits exist in chunks of tokens.

    x `[n, d]`, the same on every rank of `group`; weight `[w, d]`: this rank's classes, of the same data type. memory:
    bytes that logits may take; for the default, see `chunk_tokens`. wide_gradient: that of the weight is the float32
    sum, not rounded, for a weight whose `grad_dtype` allows it. The other arguments are those of `cross_entropy`.
    With several chunks, forward does most of backward's work, if gradients are wanted. Backward may run only once.
    The gradient of x is this rank's part, which the caller must add up over the group.
    """
    sizes = len(x), len(weight)
    labels = labels_of(*sizes, targets, group, ignore_index, label_smoothing, z_loss, vocabulary, columns)
    ranks = 1 if group is None else group.size()
    chunk = chunk_tokens(len(x), x.shape[1], -(-labels.vocabulary // ranks), x.dtype, ranks, memory)
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    triton = use_triton(backend, x.device)
    given = x.contiguous(), weight.contiguous(), targets.contiguous()
    if not triton and not torch.compiler.is_compiling():
        return _TorchLinearCrossEntropy.apply(
            *given, group if ranks > 1 else None, chunk, *wants, wide_gradient, labels
        )
    return _op(*given, name_of(group), chunk, triton, *wants, wide_gradient, *labels)[0]


def bytes_moved(tokens: int, width: int, columns: int, chunk: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward, for all chunks, and by backward, for the last: logits six times, weight, x, dx and dW."""
    early = max(tokens - 1, 0) // chunk
    logits, weight, x = (size * dtype.itemsize for size in (columns, columns * width, width))
    sums = 4 * columns * width
    forward = early * chunk * (6 * logits + 3 * x) + (tokens - early * chunk) * (2 * logits + x)
    forward += (2 * early + 1) * weight + max(2 * early - 1, 0) * sums
    backward = (tokens - early * chunk) * (4 * logits + 2 * x) + 2 * weight + (3 * sums if early else 0)
    return forward, backward
