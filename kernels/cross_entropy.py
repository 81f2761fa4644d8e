"""Cross-entropy over a vocabulary that may be split over ranks.

    loss = lse − (1 − ε)·x[target] − ε/v·Σx + z·lse²        lse = logsumexp(x)
    dx = softmax(x)·(1 + 2z·lse) − (1 − ε)·onehot(target) − ε/v
    with a cap c: x = c·tanh(y / c)        dy = dx·(1 − (x / c)²)

x are one token's logits of all v classes, ε smooths labels (Szegedy et al. 2016, arXiv 1512.00567, §7) and z keeps
lse small (Chowdhery et al. 2022, arXiv 2204.02311, §5). Each rank holds the logits of its own classes. In one
all-gather, ranks exchange two numbers per token: the log-sum-exp of their part, and their part of the terms linear in x
(Megatron-LM, arXiv 1909.08053, §3, needs three all-reduces). Only lse is saved, and backward overwrites x by dx.
Logits y may be capped first, as in Gemma 2 (arXiv 2408.00118, §2): they are stored as they are, and capped wherever
they are read.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite_kernels.backend import (
    Backend,
    Program,
    exp,
    jit,
    on_device,
    power_of_2,
    tl,
    use_triton,
    wide_dtype,
    widen,
)
from megalite_kernels.collectives import all_gather_single, group_named, name_of
from megalite_kernels.compile_cases import LLAMAS, TOKENS, CompileCase, meta
from megalite_kernels.labels import Labels, labels_of

ROWS = 128  # rows that PyTorch handles at a time: temporaries stay in cache, and are small beside the logits


def reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The loss over the whole vocabulary, in plain PyTorch."""
    wide = logits.to(wide_dtype(logits.dtype))
    if softcap is not None:
        wide = softcap * (wide / softcap).tanh()
    squares = wide.logsumexp(1).square()[targets != ignore_index]
    loss = F.cross_entropy(wide, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
    return loss + z_loss * squares.sum()


@jit
def _capped(x, CAP: tl.constexpr):
    """CAP · tanh(x / CAP)."""
    return CAP * (2.0 / (1.0 + exp(x * (-2.0 / CAP))) - 1.0)


@jit
def _stats_kernel(
    X, Targets, Stats, x_stride, first, columns,
    KEPT: tl.constexpr, SHARE: tl.constexpr, CAP: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Computes the log-sum-exp, and the terms of the loss that are linear in x, of one row's columns on this rank.

    Every lane keeps its own maximum and sum, so that lanes wait for each other only at the end. The maximum starts at a
    finite number, so that a column of −inf adds exp(−inf), not nan.
    """
    wide: tl.constexpr = Stats.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    most = tl.full([LANES], -3.4028234663852886e38, wide)
    total = tl.zeros([LANES], wide)
    plain = tl.zeros([LANES], wide)
    for start in range(0, columns, LANES * VECTOR):
        column = start + offsets
        x = widen(tl.load(X + column, mask=column < columns, other=float("-inf")))
        if CAP > 0:
            x = tl.where(column < columns, _capped(x, CAP), float("-inf"))
        higher = tl.maximum(most, tl.max(x, 1))
        total = total * exp(most - higher) + tl.sum(exp(x - higher[:, None]), 1)
        most = higher
        if SHARE > 0:
            plain += tl.sum(tl.where(column < columns, x, 0.0), 1)
    highest = tl.max(most, 0)
    summed = tl.sum(total * exp(most - highest), 0)
    local = tl.load(Targets + row) - first
    owned = (local >= 0) & (local < columns)
    of_target = widen(tl.load(X + local, mask=owned, other=0.0))
    if CAP > 0:
        of_target = _capped(of_target, CAP)
    linear = of_target * KEPT
    if SHARE > 0:
        linear += tl.sum(plain, 0) * SHARE
    tl.store(Stats + row * 2, highest + tl.log(summed))
    tl.store(Stats + row * 2 + 1, linear)


@jit
def _merge_kernel(
    Parts, Targets, Losses, Lses, count, ranks, vocabulary, ignore_index,
    Z_LOSS: tl.constexpr, IGNORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and log-sum-exp of rows, from the stats of all ranks, in their order: all ranks compute the same numbers."""
    wide: tl.constexpr = Parts.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    most = tl.full([BLOCK], -3.4028234663852886e38, wide)
    total = tl.zeros([BLOCK], wide)
    linear = tl.zeros([BLOCK], wide)
    for _ in range(ranks):
        part = tl.load(Parts + row * 2, mask=inside, other=0.0)
        linear += tl.load(Parts + row * 2 + 1, mask=inside, other=0.0)
        higher = tl.maximum(most, part)
        total = total * exp(most - higher) + exp(part - higher)
        most = higher
        row += count
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(Targets + row, mask=inside, other=0)
    lse = tl.where((target < 0) | (target >= vocabulary), float("nan"), most + tl.log(total))
    loss = lse - linear
    if Z_LOSS > 0:
        loss += lse * lse * Z_LOSS
    if IGNORES:
        loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(Losses + row, loss, mask=inside)
    tl.store(Lses + row, lse, mask=inside)


@jit
def _gradient_kernel(
    X, Targets, Lses, Scales, x_stride, scale_stride, first, columns, width, ignore_index,
    KEPT: tl.constexpr, SHARE: tl.constexpr, Z_LOSS: tl.constexpr, IGNORES: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a piece of a row of logits by its gradient: 0 in padding and ignored rows, whatever they hold."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    X += row * x_stride
    target = tl.load(Targets + row)
    lse = tl.load(Lses + row)
    if IGNORES:  # nothing of an ignored row is inside
        columns = tl.where(target == ignore_index, 0, columns)
    inside = column < columns
    x = widen(tl.load(X + column, mask=inside, other=0.0))
    if CAP > 0:
        x = _capped(x, CAP)
    gradient = exp(x - lse)
    if Z_LOSS > 0:
        gradient *= 1.0 + lse * (2.0 * Z_LOSS)
    if SHARE > 0:
        gradient -= SHARE
    gradient = tl.where(column == target - first, gradient - KEPT, gradient)
    gradient *= tl.load(Scales + row * scale_stride)
    if CAP > 0:
        gradient *= 1.0 - (x / CAP) * (x / CAP)
    tl.store(X + column, tl.where(inside, gradient, 0.0).to(X.dtype.element_ty), mask=column < width)


def stats_program(columns: int, itemsize: int) -> Program:
    """The size of forward's programs for rows of `columns` elements."""
    vector = 16 // itemsize
    lanes = min(power_of_2(-(-columns // vector)), 512)
    # Two loads a thread: with more, the compiler keeps only one in flight.
    return Program(lanes * vector, max(lanes // 64, 1))


def gradient_program(width: int, itemsize: int) -> Program:
    """The size of backward's programs for rows of `width` elements."""
    block = min(power_of_2(width), 8192 // itemsize)
    return Program(block, max(block * itemsize // 2048, 1))


@on_device
def launch_stats(logits: Tensor, targets: Tensor, labels: Labels, program: Program | None = None) -> Tensor:
    """`[n, 2]`: for every row's part on this rank, the log-sum-exp and the terms linear in x."""
    stats = logits.new_empty(len(logits), 2, dtype=wide_dtype(logits.dtype))
    block, warps = program or stats_program(labels.columns, logits.itemsize)
    vector = 16 // logits.itemsize
    constants = labels.constants
    if len(logits):
        _stats_kernel[(len(logits),)](
            logits, targets, stats, logits.stride(0), labels.first, labels.columns,
            KEPT=constants["KEPT"], SHARE=constants["SHARE"], CAP=constants["CAP"], LANES=block // vector,
            VECTOR=vector, num_warps=warps,
        )  # fmt: skip
    return stats


@on_device
def launch_merge(parts: Tensor, targets: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps `[n]` of all classes, from the stats `[t, n, 2]` of t ranks."""
    losses, lses = parts.new_empty(len(targets)), parts.new_empty(len(targets))
    constants = labels.constants
    if len(targets):
        _merge_kernel[(-(-len(targets) // 256),)](
            parts, targets, losses, lses, len(targets), len(parts), labels.vocabulary, labels.ignore_index or 0,
            Z_LOSS=constants["Z_LOSS"], IGNORES=constants["IGNORES"], BLOCK=256,
        )  # fmt: skip
    return losses, lses


@on_device
def launch_gradient(
    logits: Tensor, targets: Tensor, lses: Tensor, scales: Tensor, labels: Labels, program: Program | None = None
) -> None:
    """Overwrite logits by their gradient. scales `[n]`: the gradients of rows' losses, maybe one number expanded."""
    count, width = logits.shape
    block, warps = program or gradient_program(width, logits.itemsize)
    if logits.numel():
        _gradient_kernel[(count, -(-width // block))](
            logits, targets, lses, scales, logits.stride(0), scales.stride(0),
            labels.first, labels.columns, width, labels.ignore_index or 0, **labels.constants, BLOCK=block,
            num_warps=warps,
        )  # fmt: skip


def torch_stats(logits: Tensor, targets: Tensor, labels: Labels) -> Tensor:
    """Return what `launch_stats` returns, by PyTorch's operations."""
    stats = logits.new_zeros(len(logits), 2, dtype=wide_dtype(logits.dtype))
    for rows in _blocks(len(logits)):
        wide = labels.widened(logits[rows, : labels.columns], stats.dtype)
        stats[rows, 0] = torch.logsumexp(wide, dim=1)
        if labels.smoothing:
            stats[rows, 1] = wide.sum(1) * labels.constants["SHARE"]
    if labels.columns:
        local, owned = labels.local(targets)
        of_target = labels.widened(logits.gather(1, local[:, None])[:, 0], stats.dtype)
        stats[:, 1] += of_target.mul_(labels.constants["KEPT"]).masked_fill_(~owned, 0)
    return stats


def torch_merge(parts: Tensor, targets: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Return what `launch_merge` returns, by PyTorch's operations."""
    lses, linear = parts[0].unbind(1)
    if len(parts) > 1:
        lses, linear = parts[..., 0].logsumexp(0), parts[..., 1].sum(0)
    # Raising here would make the host wait for the device.
    lses = lses.masked_fill((targets < 0) | (targets >= labels.vocabulary), math.nan)
    losses = lses - linear
    if labels.z_loss:
        losses += labels.z_loss * lses.square()
    if labels.ignore_index is not None:
        losses.masked_fill_(targets == labels.ignore_index, 0)
    return losses, lses


def torch_gradient(logits: Tensor, targets: Tensor, lses: Tensor, scales: Tensor, labels: Labels) -> None:
    """Overwrite logits by their gradient, as `launch_gradient` does, by PyTorch's operations."""
    local, owned = labels.local(targets)
    constants = labels.constants
    for rows in _blocks(len(logits)):
        block = logits[rows, : labels.columns]
        part = labels.widened(block, lses.dtype)  # where logits have that type and no cap, it is in place
        slope = (part / labels.softcap).square_().neg_().add_(1) if labels.softcap else None
        part.sub_(lses[rows, None]).exp_()
        if labels.z_loss:
            part.mul_(1 + 2 * labels.z_loss * lses[rows, None])
        if labels.smoothing:
            part.sub_(constants["SHARE"])
        if labels.columns:
            part.scatter_add_(1, local[rows, None], owned[rows, None].to(part.dtype) * -constants["KEPT"])
        part.mul_(scales[rows, None])
        if slope is not None:
            part.mul_(slope)
        if labels.ignore_index is not None:
            part.masked_fill_((targets[rows] == labels.ignore_index)[:, None], 0)
        if part is not block:
            block.copy_(part)
    logits[:, labels.columns :] = 0


def _blocks(count: int) -> list[slice]:
    return [slice(start, min(start + ROWS, count)) for start in range(0, count, ROWS)]


def gather_stats(stats: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> tuple[Tensor, Any]:
    """The stats `[t, n, 2]` of all ranks, from one collective, and with `async_op` the work to wait for."""
    if group is None or group.size() == 1:
        return stats[None], None
    parts = stats.new_empty(group.size(), *stats.shape)
    return parts, all_gather_single(parts.flatten(0, 1), stats, group=group, async_op=async_op)


class _TorchCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, labels: Labels) -> Tensor:
        parts, _ = gather_stats(torch_stats(logits, targets, labels), group)
        losses, lses = torch_merge(parts, targets, labels)
        ctx.logits, ctx.targets, ctx.lses, ctx.labels = logits, targets, lses, labels
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.logits is None:
            raise RuntimeError("cross_entropy: its backward has run and overwrote the logits; run forward again")
        logits, ctx.logits = ctx.logits, None
        torch_gradient(logits, ctx.targets, ctx.lses, grad.expand(len(logits)), ctx.labels)
        return logits.detach(), None, None, None


@torch.library.custom_op("megalite::cross_entropy", mutates_args=())
def _op(
    logits: Tensor, targets: Tensor, group: str, first: int, columns: int, vocabulary: int,
    ignore_index: int | None, smoothing: float, z_loss: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses and log-sum-exps `[n]`; group: the name of a process group, or nothing."""
    labels = Labels(first, columns, vocabulary, ignore_index, smoothing, z_loss, softcap)
    stats = launch_stats(logits, targets, labels)
    parts, _ = gather_stats(stats, group_named(group))
    return launch_merge(parts, targets, labels)


@_op.register_fake
def _(logits: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(len(logits), dtype=wide_dtype(logits.dtype))
    return losses, torch.empty_like(losses)


@torch.library.custom_op("megalite::cross_entropy_backward", mutates_args=("logits",))
def _backward_op(
    logits: Tensor, targets: Tensor, lses: Tensor, scales: Tensor, first: int, columns: int, vocabulary: int,
    ignore_index: int | None, smoothing: float, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """Overwrites logits by their gradient."""
    labels = Labels(first, columns, vocabulary, ignore_index, smoothing, z_loss, softcap)
    launch_gradient(logits, targets, lses, scales, labels)


@_backward_op.register_fake
def _(logits: Tensor, *_: Any) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, _, *labels = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.labels = labels


@once_differentiable
def _gradients(ctx: Any, scales: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, targets, lses = ctx.saved_tensors
    _backward_op(logits, targets, lses, scales, *ctx.labels)
    return logits.detach(), *(None,) * 9


_op.register_autograd(_gradients, setup_context=_save)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
    columns: range | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Sum over rows of the cross-entropy, in float32 or wider.

    logits `[n, w]`: this rank's part of the vocabulary; backward overwrites them, so nothing else may use them.
    targets `[n]`: numbers of classes, the same on every rank of `group`. A row whose target is `ignore_index` adds
    nothing; any other target outside the vocabulary makes the loss and its row's gradient nan. label_smoothing and
    z_loss: ε and z above.

    columns: the classes in this rank's first columns; further columns are padding. By default, every rank has the next
    w classes. vocabulary: the number of classes, by default w times the ranks; classes from there on are padding.
    softcap: c above.
    All ranks return the same sum, after one collective. Backward may run only once and needs no collective.
    """
    rows, width = logits.shape
    labels = labels_of(rows, width, targets, group, ignore_index, label_smoothing, z_loss, vocabulary, columns, softcap)
    if not use_triton(backend, logits.device):
        return _TorchCrossEntropy.apply(logits, targets, group, labels)
    if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:
        logits = logits.contiguous()
    return _op(logits, targets.contiguous(), name_of(group), *labels)[0].sum()


def bytes_moved(tokens: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward: logits in; by backward: logits in, their gradient out."""
    size = tokens * columns * dtype.itemsize
    return size, 2 * size


def compile_cases() -> Iterator[CompileCase]:
    vocabulary = LLAMAS["Llama 3 8B"].vocabulary  # classes of every model in LLAMAS
    for dtype in (torch.bfloat16, torch.float32):
        for ranks, smoothing, z_loss, cap in (
            (1, 0.0, 0.0, 0.0),
            (8, 0.0, 0.0, 0.0),
            (8, 0.1, 1e-4, 0.0),
            (1, 0.0, 0.0, 30.0),
        ):
            width = vocabulary // ranks
            labels = Labels(0, width, vocabulary, -100, smoothing, z_loss, cap)
            logits, targets = meta(TOKENS, width, dtype=dtype), meta(TOKENS, dtype=torch.int64)
            stats, lses = meta(ranks, TOKENS, 2, dtype=torch.float32), meta(TOKENS, dtype=torch.float32)
            model = f"Llama 3 on {ranks} ranks" + ", smoothed" * (smoothing > 0) + ", capped" * (cap > 0)
            yield CompileCase("cross_entropy", model, dtype, partial(launch_stats, logits, targets, labels))
            yield CompileCase("cross_entropy merge", model, dtype, partial(launch_merge, stats, targets, labels), False)
            backward = partial(launch_gradient, logits, targets, lses, lses[0].expand(TOKENS), labels)
            yield CompileCase("cross_entropy backward", model, dtype, backward)
