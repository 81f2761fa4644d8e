"""The last linear layer and cross-entropy in one operation, which makes the logits of many tokens chunk by chunk.

For each chunk of tokens, forward computes logits = x·Wᵀ, their losses and gradient g as in `cross_entropy`, and then at
once dx = g·W and dW += gᵀ·x, after which the logits can be freed (after Hsu et al. 2024, arXiv 2410.10989, §3.2). The
gradient of the loss is not known in forward, so backward multiplies dx and dW by it. The last chunk's logits are kept
for backward, as separate layers would keep theirs. So with a single chunk, the cost is that of separate layers. A
single chunk is used if the logits of all tokens take no more memory than several chunks and the float32 dW.

A second product of few features, such as an adapter's, may be added to the logits; its gradients are made alike.
Losses of tokens may have factors, which forward must know, as it makes their gradients.

Each chunk reads and writes dW, kept in float32, so small chunks are slow. If ranks split the vocabulary, each chunk
needs one all-gather, which overlaps with computing the next chunk's logits.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
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
from megalite_kernels.products import add_product, multiply

MIN_CHUNK_TOKENS = 4096  # tokens of a chunk: with fewer, the time to sum dW in float32 shows beside the matrix products
TILE_TOKENS = 128  # tokens of a matrix product's tile


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


class Factors(NamedTuple):
    """Features `[n, d]` and weight `[w, d]`, whose product is a term of the logits, and which gradients are wanted."""

    x: Tensor
    weight: Tensor
    wants_dx: bool
    wants_dw: bool


def _forward(
    terms: Sequence[Factors], targets: Tensor, scales: Tensor, group: dist.ProcessGroup | None, chunk: int,
    triton: bool, labels: Labels,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss; that of every token, where they have `scales`; the logits and log-sum-exps of the last chunk; of each
    term, dx and the sum of dW of all chunks but it.

    Tensors that are not wanted are empty. With one chunk, dx and dW are empty too.
    """
    merge, gradient = (launch_merge, launch_gradient) if triton else (torch_merge, torch_gradient)
    wants, chunks = _wants(terms), _chunks(len(targets), chunk)
    loss, each, last, last_lses, *made = _outputs(terms, scales, chunk, buffers=False)
    loss.zero_()
    scaling = scales if len(scales) else torch.ones_like(loss).expand(len(targets))
    for tokens, logits, parts, gathering in _logits(terms, targets, chunks, group, triton, labels):
        if gathering is not None:
            gathering.wait()
        losses, lses = merge(parts, targets[tokens], labels)
        if len(scales):
            each[tokens] = losses
            losses = losses * scales[tokens]
        loss += losses.sum()
        if not wants:
            continue
        if tokens == chunks[-1]:
            last, last_lses = logits, lses
            break
        gradient(logits, targets[tokens], lses, scaling[tokens], labels)
        for term, dx, dw in zip(terms, made[::2], made[1::2], strict=True):
            if term.wants_dx:
                multiply(logits, term.weight, dx[tokens])
            if term.wants_dw:
                add_product(dw, logits.T, term.x[tokens], beta=int(tokens.start > 0))
    return loss, each, last, last_lses, *made


def _wants(terms: Sequence[Factors]) -> bool:
    return any(term.wants_dx or term.wants_dw for term in terms)


def _logits(
    terms: Sequence[Factors], targets: Tensor, chunks: list[slice], group: dist.ProcessGroup | None, triton: bool,
    labels: Labels,
) -> Iterator[tuple[slice, Tensor, Tensor, Any]]:  # fmt: skip
    """Yields every chunk's tokens, logits, stats of all ranks, and the work to wait for before the stats may be read.

    If there is work to wait for, the next chunk's logits are computed first. Otherwise all chunks use one buffer.
    """
    size, (first, *others) = max((chunk.stop - chunk.start for chunk in chunks), default=0), terms
    buffers = [first.x.new_empty(size, len(first.weight)) for _ in chunks[: 1 if group is None else 2]]
    stats_of = launch_stats if triton else torch_stats
    begun = []
    for number, tokens in enumerate(chunks):
        logits = buffers[number % len(buffers)][: tokens.stop - tokens.start]
        multiply(first.x[tokens], first.weight.T, logits)
        for term in others:
            if term.x.shape[1]:
                logits.addmm_(term.x[tokens], term.weight.T)
        stats = stats_of(logits, targets[tokens], labels)
        begun.append((tokens, logits, *gather_stats(stats, group, async_op=True)))
        if len(begun) == len(buffers):
            yield begun.pop(0)
    yield from begun


def _outputs(terms: Sequence[Factors], scales: Tensor, chunk: int, buffers: bool = True) -> tuple[Tensor, ...]:
    """The results of `_forward` as tensors without values; without `buffers`, those of the last chunk are empty."""
    x, weight = terms[0].x, terms[0].weight
    wide, early = wide_dtype(x.dtype), _early(len(x), chunk)
    kept = len(x) - early if buffers and _wants(terms) else 0
    made = [x.new_empty((), dtype=wide), x.new_empty(len(scales), dtype=wide)]
    made += [x.new_empty(kept, len(weight)), x.new_empty(kept, dtype=wide)]
    for term in terms:
        made.append(x.new_empty(len(x) if term.wants_dx and early else 0, term.x.shape[1]))
        made.append(x.new_empty(len(weight) if term.wants_dw and early else 0, term.x.shape[1], dtype=wide))
    return tuple(made)


def _early(tokens: int, chunk: int) -> int:
    """The number of tokens in all chunks but the last."""
    return max(tokens - 1, 0) // chunk * chunk


def _backward(
    scale: Tensor, terms: Sequence[Factors], targets: Tensor, scales: Tensor, last: Tensor, lses: Tensor,
    made: Sequence[Tensor], triton: bool, wide: bool, labels: Labels,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x and of the weight of each term, from the saved tensors. made: dx and dW of each, from `_forward`.

    Empty if unwanted, if dx holds that of x, or if dW holds that of the weight, as it does where that is `wide`.
    """
    early = len(targets) - len(last)
    # With one chunk, the scaled gradient is rounded once; with several, their sum is scaled as a whole.
    of_last = (torch.ones_like(scale) if early else scale).expand(len(last))
    if len(scales):
        of_last = of_last * scales[early:]
    gradient = launch_gradient if triton else torch_gradient
    gradient(last, targets[early:], lses, of_last, labels)
    found = _gradients_like(terms, early, wide)
    for term, dx, dw, new_dx, all_dw in zip(terms, made[::2], made[1::2], found[::2], found[1::2], strict=True):
        if term.wants_dx:
            multiply(last, term.weight, (dx if early else new_dx)[early:])
            if early:
                dx *= scale
        if term.wants_dw and early:
            add_product(dw, last.T, term.x[early:])
            torch.mul(dw, scale, out=dw if wide else all_dw)
        elif term.wants_dw:
            add_product(all_dw, last.T, term.x, beta=0)
    return found


def _gradients_like(terms: Sequence[Factors], early: int, wide: bool) -> tuple[Tensor, ...]:
    found = []
    for x, weight, wants_dx, wants_dw in terms:
        dtype = wide_dtype(x.dtype) if wide else weight.dtype
        found.append(torch.empty_like(x) if wants_dx and not early else x.new_empty(0))
        found.append(
            torch.empty_like(weight, dtype=dtype) if wants_dw and not (wide and early) else weight.new_empty(0)
        )
    return tuple(found)


class _TorchLinearCrossEntropy(torch.autograd.Function):
    """The gradients of all terms' factors; given are these, one after another."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, scales: Tensor, group: dist.ProcessGroup | None, chunk: int,
        wants: Sequence[bool], wide: bool, labels: Labels, *given: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        loss, each, *ctx.kept = _forward(_terms(given, wants), targets, scales, group, chunk, False, labels)
        ctx.save_for_backward(targets, scales, *given)
        ctx.options = wants, wide, labels
        ctx.mark_non_differentiable(each)
        ctx.set_materialize_grads(False)
        return loss, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: None) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError(
                "linear_cross_entropy: its backward has run and overwrote what it needs; run forward again"
            )
        (last, lses, *made), ctx.kept = ctx.kept, None
        (wants, wide, labels), (targets, scales, *given) = ctx.options, ctx.saved_tensors
        found = _backward(scale, _terms(given, wants), targets, scales, last, lses, made, False, wide, labels)
        return *(None,) * 7, *_both(made, found, wants, wide)


def _terms(given: Sequence[Tensor], wants: Sequence[bool]) -> list[Factors]:
    """The terms of the logits. given, wants: of each its factors, and which gradients of them are wanted."""
    return list(map(Factors, given[::2], given[1::2], wants[::2], wants[1::2]))


def _both(
    made: Sequence[Tensor], found: Sequence[Tensor], wants: Sequence[bool], wide: bool
) -> Iterator[Tensor | None]:
    """The gradients for autograd. With several chunks, that of x is in dx, and a wide one of the weight in dW."""
    for number, (early, whole, wanted) in enumerate(zip(made, found, wants, strict=True)):
        of_x = number % 2 == 0
        yield (early.detach() if len(early) and (of_x or wide) else whole) if wanted else None


@torch.library.custom_op("megalite::linear_cross_entropy", mutates_args=())
def _op(
    given: Sequence[Tensor], targets: Tensor, scales: Tensor, group: str, chunk: int, triton: bool,
    wants: Sequence[bool], wide: bool, first: int, columns: int, vocabulary: int, ignore_index: int | None,
    smoothing: float, z_loss: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    labels = Labels(first, columns, vocabulary, ignore_index, smoothing, z_loss, softcap)
    return _forward(_terms(given, wants), targets, scales, group_named(group), chunk, triton, labels)  # type: ignore


@_op.register_fake
def _(
    given: Sequence[Tensor], targets: Tensor, scales: Tensor, group: str, chunk: int, triton: bool,
    wants: Sequence[bool], *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _outputs(_terms(given, wants), scales, chunk)


@torch.library.custom_op("megalite::linear_cross_entropy_backward", mutates_args=("last", "made"))
def _backward_op(
    scale: Tensor, given: Sequence[Tensor], targets: Tensor, scales: Tensor, last: Tensor, lses: Tensor,
    made: Sequence[Tensor], triton: bool, wants: Sequence[bool], wide: bool,
    first: int, columns: int, vocabulary: int, ignore_index: int | None, smoothing: float, z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    labels = Labels(first, columns, vocabulary, ignore_index, smoothing, z_loss, softcap)
    return _backward(scale, _terms(given, wants), targets, scales, last, lses, made, triton, wide, labels)  # type: ignore


@_backward_op.register_fake
def _(
    scale: Tensor, given: Sequence[Tensor], targets: Tensor, scales: Tensor, last: Tensor, lses: Tensor,
    made: Sequence[Tensor], triton: bool, wants: Sequence[bool], wide: bool, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _gradients_like(_terms(given, wants), len(targets) - len(last), wide)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given, targets, scales, _, _, *options = inputs
    ctx.count = len(given)
    ctx.save_for_backward(targets, scales, *given, *output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros instead of missing gradients would take as much memory
    ctx.options = options


@once_differentiable
def _gradients(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Any, ...]:
    targets, scales, *saved = ctx.saved_tensors
    given, (last, lses, *made) = saved[: ctx.count], saved[ctx.count :]
    _, wants, wide, *_ = ctx.options
    found = _backward_op(scale, given, targets, scales, last, lses, made, *ctx.options)
    return list(_both(made, found, wants, wide)), *(None,) * 14


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
    softcap: float | None = None,
    memory: int | None = None,
    wide_gradient: bool = False,
    beside: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`cross_entropy(x @ weight.T, targets, …)`, whose logits exist in chunks of tokens.

    x `[n, d]`, the same on every rank of `group`; weight `[w, d]`: this rank's classes, of the same data type. memory:
    bytes that logits may take; for the default, see `chunk_tokens`. wide_gradient: that of the weight is the float32
    sum, not rounded, for a weight whose `grad_dtype` allows it. beside: features `[n, r]` and a weight `[w, r]`, whose
    product is added to the logits. The other arguments are those of `cross_entropy`.
    With several chunks, forward does most of backward's work, if gradients are wanted. Backward may run only once.
    The gradient of x is this rank's part, which the caller must add up over the group.
    """
    scales = x.new_empty(0, dtype=wide_dtype(x.dtype))
    options = ignore_index, label_smoothing, z_loss, vocabulary, columns, softcap
    return _losses(x, weight, targets, scales, group, options, memory, wide_gradient, beside, backend)[0]


def scaled_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scales: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int | None = None,
    vocabulary: int | None = None,
    softcap: float | None = None,
    memory: int | None = None,
    wide_gradient: bool = False,
    beside: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` in which the loss of every token has a factor; and each token's loss without it, `[n]`.

    scales `[n]`: the factors, in the data type of losses. The losses of tokens have no gradient.
    """
    options = ignore_index, 0.0, 0.0, vocabulary, None, softcap
    return _losses(x, weight, targets, scales.contiguous(), group, options, memory, wide_gradient, beside, backend)


def _losses(
    x: Tensor, weight: Tensor, targets: Tensor, scales: Tensor, group: dist.ProcessGroup | None,
    options: tuple[Any, ...], memory: int | None, wide: bool, beside: tuple[Tensor, Tensor] | None, backend: Backend,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, and that of every token where tokens have `scales`. options: those of `labels_of`."""
    sizes = len(x), len(weight)
    labels = labels_of(*sizes, targets, group, *options)
    ranks = 1 if group is None else group.size()
    chunk = chunk_tokens(len(x), x.shape[1], -(-labels.vocabulary // ranks), x.dtype, ranks, memory)
    terms = (x, weight, *(beside or (x.new_empty(len(x), 0), weight.new_empty(len(weight), 0))))
    given = [tensor.contiguous() for tensor in terms]
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in given]
    triton, targets = use_triton(backend, x.device), targets.contiguous()
    if not triton and not torch.compiler.is_compiling():
        return _TorchLinearCrossEntropy.apply(
            targets, scales, group if ranks > 1 else None, chunk, wants, wide, labels, *given
        )
    return _op(given, targets, scales, name_of(group), chunk, triton, wants, wide, *labels)[:2]


def bytes_moved(tokens: int, width: int, columns: int, chunk: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward, for all chunks, and by backward, for the last: logits six times, weight, x, dx and dW."""
    early = max(tokens - 1, 0) // chunk
    logits, weight, x = (size * dtype.itemsize for size in (columns, columns * width, width))
    sums = 4 * columns * width
    forward = early * chunk * (6 * logits + 3 * x) + (tokens - early * chunk) * (2 * logits + x)
    forward += (2 * early + 1) * weight + max(2 * early - 1, 0) * sums
    backward = (tokens - early * chunk) * (4 * logits + 2 * x) + 2 * weight + (3 * sums if early else 0)
    return forward, backward
