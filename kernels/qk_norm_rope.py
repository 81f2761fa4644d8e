"""Query-key norm (Henry et al. 2020, arXiv 2010.04245; RMSNorm as in Qwen3) and rotary position embedding in one pass.

    n = x · r · w        r = 1 / sqrt(mean(x²) + eps)        y = turn(n), as in `rope`
    dn = turn back(dy)        dx = r · (w · dn − x · r² · mean(x · w · dn))        dw = Σ over heads of dn · x · r

The mean is over the features of a head. Only x is saved: a head fits into registers, so backward computes r again. Each
program of backward keeps one partial dw, as in `rms_norm`. n is not rounded before it is turned.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite_kernels.backend import Backend, jit, multiprocessors, on_device, tl, use_triton, wide_dtype
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, models
from megalite_kernels.rms_norm import reference as rms_norm_reference
from megalite_kernels.rms_norm import rms_norm
from megalite_kernels.rope import Layout, block, check, load_heads, load_pairs, rope, store_pairs, tables, turn
from megalite_kernels.rope import reference as rope_reference

PROGRAMS = 3  # programs of backward per multiprocessor: as many as fit into its registers at once


def reference(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    positions: Tensor | int = 0,
    layout: Layout = "half",
) -> Tensor:
    normal = rms_norm_reference(x.to(wide_dtype(x.dtype)), weight, eps)
    return rope_reference(normal, cos, sin, positions, layout).to(x.dtype)


@jit
def _load_weight(W, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    row = tl.zeros([1, 1], tl.int32)
    return load_pairs(W, row, row == 0, 1, HALF, PAIRS, INTERLEAVED)


@jit
def _inverse(first, second, inside, HALF: tl.constexpr, EPS: tl.constexpr):
    """1 / root mean square of each row; 0 for rows that are not inside, so that these add nothing."""
    mean = tl.sum(first * first + second * second, 1, keep_dims=True) / (2 * HALF)
    return tl.where(inside, tl.rsqrt(mean + EPS), 0.0)


@jit
def _qk_norm_rope_forward(
    X, W, Cos, Sin, Positions, Y, count, batch, at_stride, item_stride, head_stride,
    start, table_stride, table_item_stride, positions_at_stride, positions_item_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    offsets, inside, first, second, cos, sin = load_heads(
        tl.program_id(0), X, Cos, Sin, Positions, count, batch, at_stride, item_stride, head_stride,
        start, table_stride, table_item_stride, positions_at_stride, positions_item_stride,
        HEADS, ROWS, HALF, PAIRS, INTERLEAVED,
    )  # fmt: skip
    w_first, w_second = _load_weight(W, HALF, PAIRS, INTERLEAVED)
    inverse = _inverse(first, second, inside, HALF, EPS)
    first, second = turn(first * inverse * w_first, second * inverse * w_second, cos, sin)
    store_pairs(Y, offsets, first, second, inside, ROWS, HALF, PAIRS, INTERLEAVED)


@jit
def _qk_norm_rope_backward(
    X, W, Cos, Sin, Positions, DY, DX, Sums, count, batch, at_stride, item_stride, head_stride,
    start, table_stride, table_item_stride, positions_at_stride, positions_item_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Compute DX for every num_programs-th block of heads, and this program's part of dw."""
    w_first, w_second = _load_weight(W, HALF, PAIRS, INTERLEAVED)
    sum_first = tl.zeros([ROWS, PAIRS], Sums.dtype.element_ty)
    sum_second = tl.zeros([ROWS, PAIRS], Sums.dtype.element_ty)
    for number in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        offsets, inside, first, second, cos, sin = load_heads(
            number, X, Cos, Sin, Positions, count, batch, at_stride, item_stride, head_stride,
            start, table_stride, table_item_stride, positions_at_stride, positions_item_stride,
            HEADS, ROWS, HALF, PAIRS, INTERLEAVED,
        )  # fmt: skip
        inverse = _inverse(first, second, inside, HALF, EPS)
        first, second = first * inverse, second * inverse
        dy_first, dy_second = load_pairs(DY, offsets, inside, ROWS, HALF, PAIRS, INTERLEAVED)
        # `turn` by −sin would take 24 registers more. In this order, no Triton from 3.6 to 3.8 spills any.
        dn_first = dy_first * cos + dy_second * sin
        dn_second = dy_second * cos - dy_first * sin
        along = tl.sum(dn_first * first * w_first + dn_second * second * w_second, 1, keep_dims=True) / (2 * HALF)
        dx_first = (dn_first * w_first - first * along) * inverse
        dx_second = (dn_second * w_second - second * along) * inverse
        sum_first += dn_first * first
        sum_second += dn_second * second
        store_pairs(DX, offsets, dx_first, dx_second, inside, ROWS, HALF, PAIRS, INTERLEAVED)
    row = tl.program_id(0) + tl.zeros([1, 1], tl.int64)
    sum_first, sum_second = tl.sum(sum_first, 0, keep_dims=True), tl.sum(sum_second, 0, keep_dims=True)
    store_pairs(Sums, row * (2 * HALF), sum_first, sum_second, row >= 0, 1, HALF, PAIRS, INTERLEAVED)


@on_device
def launch_forward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    positions: Tensor | None, start: int, interleaved: bool,
) -> Tensor:  # fmt: skip
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = x.new_empty(x.shape)
    angles, strides = tables(cos, sin, positions)
    count, sizes = x.shape[:-1].numel(), block(x)
    if interleaved:
        sizes["num_warps"] = 8  # to take pairs apart takes registers: with 4 warps, Triton 3.8 spills some on sm_100
    if x.numel():
        _qk_norm_rope_forward[(-(-count // sizes["ROWS"]),)](
            x, weight.contiguous(), *angles, positions, y, count, x.shape[1], *x.stride()[:3],
            start, *strides, EPS=eps, INTERLEAVED=interleaved, **sizes,
        )  # fmt: skip
    return y


@on_device
def launch_backward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    positions: Tensor | None, start: int, interleaved: bool, dy: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the weight."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    dx = x.new_empty(x.shape)
    angles, strides = tables(cos, sin, positions)
    count, sizes = x.shape[:-1].numel(), {**block(x), "num_warps": 8}
    programs = min(PROGRAMS * multiprocessors(x.device), -(-count // sizes["ROWS"])) if x.numel() else 0
    sums = x.new_empty(programs, x.shape[-1], dtype=wide_dtype(x.dtype))
    if programs:
        _qk_norm_rope_backward[(programs,)](
            x, weight.contiguous(), *angles, positions, dy.contiguous(), dx, sums,
            count, x.shape[1], *x.stride()[:3], start, *strides,
            EPS=eps, INTERLEAVED=interleaved, **sizes,
        )  # fmt: skip
    return dx, sums.sum(0).to(weight.dtype)


@torch.library.custom_op("megalite::qk_norm_rope", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    positions: Tensor | None, start: int, interleaved: bool,
) -> Tensor:  # fmt: skip
    return launch_forward(x, weight, cos, sin, eps, positions, start, interleaved)


@_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("megalite::qk_norm_rope_backward", mutates_args=())
def _backward_op(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    positions: Tensor | None, start: int, interleaved: bool, dy: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return launch_backward(x, weight, cos, sin, eps, positions, start, interleaved, dy)


@_backward_op.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, eps, positions, start, interleaved = inputs
    ctx.save_for_backward(x, weight, cos, sin, positions)
    ctx.how = eps, start, interleaved


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cos, sin, positions = ctx.saved_tensors
    eps, start, interleaved = ctx.how
    return *_backward_op(x, weight, cos, sin, eps, positions, start, interleaved, dy), *[None] * 6


_op.register_autograd(_gradients, setup_context=_save)


def qk_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    positions: Tensor | int = 0,
    layout: Layout = "half",
    backend: Backend = "auto",
) -> Tensor:
    """RMSNorm of every head of queries or keys x `[s, b, h, e]` times weight `[e]`, turned by its position's angles.

    The other arguments are those of `rope`.
    """
    check(x, cos, sin, positions, layout)
    if not use_triton(backend, x.device):
        return rope(rms_norm(x, weight, eps, backend), cos, sin, positions, layout, backend)
    by_token, start = (positions, 0) if isinstance(positions, Tensor) else (None, positions)
    return _op(x, weight, cos, sin, eps, by_token, start, layout == "interleaved")


def bytes_moved(tokens: int, heads: int, head_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward: x in, y out; by backward: x and dy in, dx out."""
    size = tokens * heads * head_size * dtype.itemsize
    return 2 * size, 3 * size


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in models():
        cos = meta(TOKENS, 1, 1, shape.head_size // 2, dtype=torch.float32)
        x, weight = meta(TOKENS, 1, shape.heads, shape.head_size, dtype=dtype), meta(shape.head_size, dtype=dtype)
        for layout in ("half", "interleaved"):
            given = x, weight, cos, cos, 1e-6, None, 0, layout == "interleaved"
            yield CompileCase(f"qk_norm_rope, {layout}", model, dtype, partial(launch_forward, *given))
            yield CompileCase(f"qk_norm_rope backward, {layout}", model, dtype, partial(launch_backward, *given, x))
