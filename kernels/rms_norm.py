"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv 1910.07467), over rows of `d` features:

    r = 1 / sqrt(mean(x²) + eps)        y = x · r · w
    dx = r · (w · dy − x · r² · mean(x · w · dy))        dw = Σ over rows of dy · x · r

Backward runs a fixed number of programs, each for its own part of the rows. Each program keeps one partial dw in
registers. These are then added in a fixed order, so that gradients are deterministic. Rows too wide for the registers
are read twice, in tiles of columns, the second time from cache. `add_rms_norm` uses the same kernels.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import apex
from megalite_kernels.backend import (
    Backend,
    Program,
    as_rows,
    jit,
    multiprocessors,
    on_device,
    power_of_2,
    shared_memory,
    times,
    tl,
    use_triton,
    wide_dtype,
    widen,
)
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, models

ELEMENTS = 4096  # elements of a program's block, if rows are narrow enough
SCRATCH_BYTES = 1024  # bytes of shared memory for sums over a program's threads


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(wide_dtype(x.dtype))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def _torch(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x, and 1 / root mean square `[…, 1]`."""
    wide = x.to(wide_dtype(x.dtype))
    inverse = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    normal = times(wide * inverse, weight)
    # See times: `to` may return what it is given.
    return (normal if normal.dtype == x.dtype else normal.to(x.dtype)), inverse


class _TorchRMSNorm(torch.autograd.Function):
    """RMSNorm in plain PyTorch, in few passes. It saves x and one number per row for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normal, inverse = _torch(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return normal

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normal, grad = x.to(inverse.dtype) * inverse, grad.to(inverse.dtype)
        of_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, normal).div_(x.shape[-1]).unsqueeze(-1)
        return times(grad.sub_(normal.mul_(along)), inverse).to(x.dtype), of_weight, None


@jit
def _load(X, Add, x_offsets, add_offsets, inside):
    """X or, if Add is given, X + Add, rounded to the data type in which it is stored."""
    x = widen(tl.load(X + x_offsets, mask=inside, other=0.0))
    if Add is not None:
        x = widen((x + widen(tl.load(Add + add_offsets, mask=inside, other=0.0))).to(X.dtype.element_ty))
    return x


@jit
def _rms_norm_forward(
    X, Add, W, Y, Total, Inverse, count, x_stride, add_stride,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Normalizes ROWS rows of X or, if Add is given, of Total = X + Add."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    squares = tl.zeros([ROWS, TILE], Inverse.dtype.element_ty)
    for tile in tl.static_range(TILES):
        columns = tile * TILE + tl.arange(0, TILE)[None, :]
        inside = (rows < count) & (columns < WIDTH)
        x = _load(X, Add, rows * x_stride + columns, rows * add_stride + columns, inside)
        if Add is not None:
            tl.store(Total + rows * WIDTH + columns, x.to(Total.dtype.element_ty), mask=inside)
        squares += x * x
    if TILES == 1:  # loaded before the sum, which waits for all loads
        w = widen(tl.load(W + columns, mask=columns < WIDTH, other=0.0))
    mean = tl.sum(squares, 1, keep_dims=True) / WIDTH
    inverse = tl.rsqrt(mean + EPS)
    tl.store(Inverse + rows, inverse, mask=rows < count)
    for tile in tl.static_range(TILES):
        columns = tile * TILE + tl.arange(0, TILE)[None, :]
        inside = (rows < count) & (columns < WIDTH)
        if TILES > 1:
            x = _load(X, Add, rows * x_stride + columns, rows * add_stride + columns, inside)
            w = widen(tl.load(W + columns, mask=columns < WIDTH, other=0.0))
        tl.store(Y + rows * WIDTH + columns, (x * inverse * w).to(Y.dtype.element_ty), mask=inside)


@jit
def _rms_norm_backward(
    X, W, Inverse, DY, DTotal, DX, PartialSums, count,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Computes DX, with DTotal added if it is given, and a partial sum of dw, for every num_programs-th block of rows.

    PARTS programs share a block: each reads whole rows for the mean, and then its own TILES tiles of columns again.
    STAGES: blocks in flight; the next are read while one is summed.
    """
    program, first = tl.program_id(1), tl.program_id(0) * TILES
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros([ROWS, TILE], PartialSums.dtype.element_ty),)  # noqa: RUF005
    for block in tl.range(program, tl.cdiv(count, ROWS), tl.num_programs(1), num_stages=STAGES):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inverse = tl.load(Inverse + rows, mask=rows < count, other=0.0)
        products = tl.zeros([ROWS, TILE], PartialSums.dtype.element_ty)
        for tile in tl.static_range(TILES * PARTS):
            columns = tile * TILE + tl.arange(0, TILE)[None, :]
            inside = (rows < count) & (columns < WIDTH)
            normal = widen(tl.load(X + rows * WIDTH + columns, mask=inside, other=0.0)) * inverse
            dy = widen(tl.load(DY + rows * WIDTH + columns, mask=inside, other=0.0))
            w = widen(tl.load(W + columns, mask=columns < WIDTH, other=0.0))
            products += normal * (dy * w)
        along = tl.sum(products, 1, keep_dims=True) / WIDTH
        grown = ()
        for tile in tl.static_range(TILES):
            columns = (first + tile) * TILE + tl.arange(0, TILE)[None, :]
            inside = (rows < count) & (columns < WIDTH)
            if TILES * PARTS > 1:
                normal = widen(tl.load(X + rows * WIDTH + columns, mask=inside, other=0.0)) * inverse
                dy = widen(tl.load(DY + rows * WIDTH + columns, mask=inside, other=0.0))
                w = widen(tl.load(W + columns, mask=columns < WIDTH, other=0.0))
            dx = (dy * w - normal * along) * inverse
            if DTotal is not None:
                dx += widen(tl.load(DTotal + rows * WIDTH + columns, mask=inside, other=0.0))
            tl.store(DX + rows * WIDTH + columns, dx.to(DX.dtype.element_ty), mask=inside)
            grown = grown + (sums[tile] + dy * normal,)  # noqa: RUF005
        sums = grown
    row = program.to(tl.int64) * WIDTH
    for tile in tl.static_range(TILES):
        columns = (first + tile) * TILE + tl.arange(0, TILE)[None, :]
        tl.store(PartialSums + row + columns, tl.sum(sums[tile], 0, keep_dims=True), mask=columns < WIDTH)


def forward_program(width: int) -> Program:
    """The size of forward's programs for rows of `width` elements."""
    elements = min(max(power_of_2(width), ELEMENTS), 16384)
    return Program(elements, min(elements // 512, 16))


def forward_block(width: int, program: Program | None = None) -> dict[str, int]:
    """The block of a program of forward: several rows, or one, in tiles of columns if it is too wide for registers."""
    elements, warps = program or forward_program(width)
    tile = min(power_of_2(width), elements)
    return {"ROWS": elements // tile, "TILE": tile, "TILES": -(-width // tile), "num_warps": warps}


def backward_program(width: int) -> Program:
    """The size of backward's programs for rows of `width` elements."""
    if width > 8192:
        return Program(ELEMENTS, 16)
    elements = max(power_of_2(width), ELEMENTS)
    return Program(elements, elements // 512)


def backward_block(
    width: int, itemsize: int, weight_itemsize: int, shared: int, program: Program | None = None
) -> dict[str, int]:
    """The block of a program of backward. PARTS programs share rows of many tiles, so that each can hold its dw in
    registers.

    shared: bytes of shared memory that a program may use. It holds three inputs, 1 / root mean square and the weight,
    at most twice.
    """
    elements, warps = program or backward_program(width)
    tile = min(power_of_2(width), elements)
    rows = elements // tile
    tiles = -(-width // tile)
    parts = -(-tiles // (4 if itemsize == 2 else 1))
    ahead = 2 * (rows * (3 * tile * itemsize + max(itemsize, 4)) + tile * weight_itemsize) + SCRATCH_BYTES
    stages = 3 if tiles == 1 and ahead <= shared else 1
    return {
        "ROWS": rows,
        "TILE": tile,
        "TILES": -(-tiles // parts),
        "PARTS": parts,
        "STAGES": stages,
        "num_warps": warps,
    }


@on_device
def launch_forward(
    x: Tensor, add: Tensor | None, weight: Tensor, eps: float, program: Program | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm of x or, if add is given, of x + add; that sum; and 1 / root mean square `[n]` of every row."""
    rows, others = as_rows(x), None if add is None else as_rows(add)
    count, width = rows.shape
    y = x.new_empty(x.shape)
    total = None if add is None else x.new_empty(x.shape)
    inverse = x.new_empty(count, dtype=wide_dtype(x.dtype))
    block = forward_block(width, program)
    if x.numel():
        _rms_norm_forward[(-(-count // block["ROWS"]),)](
            rows, others, weight.contiguous(), y, total, inverse,
            count, rows.stride(0), 0 if others is None else others.stride(0), WIDTH=width, EPS=eps, **block,
        )  # fmt: skip
    return y, total, inverse


@on_device
def launch_backward(
    x: Tensor, weight: Tensor, inverse: Tensor, dy: Tensor, dtotal: Tensor | None, program: Program | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, with dtotal added, and of the weight."""
    count, width = x.shape[:-1].numel(), x.shape[-1]
    dx = x.new_empty(x.shape)
    block = backward_block(width, x.itemsize, weight.itemsize, shared_memory(x.device), program)
    at_once = multiprocessors(x.device) * min(max(8192 // width, 1), 2)
    programs = min(max(at_once // block["PARTS"], 1), -(-count // block["ROWS"])) if x.numel() else 0
    partial_sums = x.new_empty(programs, width, dtype=inverse.dtype)
    if programs:
        _rms_norm_backward[(block["PARTS"], programs)](
            x.contiguous(), weight.contiguous(), inverse, dy.contiguous(),
            None if dtotal is None else dtotal.contiguous(), dx, partial_sums, count, WIDTH=width, **block,
        )  # fmt: skip
    return dx, partial_sums.sum(0).to(weight.dtype)


@torch.library.custom_op("megalite::rms_norm", mutates_args=())
def _op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, inverse = launch_forward(x, None, weight, eps)
    return y, inverse


@_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=wide_dtype(x.dtype))


@torch.library.custom_op("megalite::rms_norm_backward", mutates_args=())
def _backward_op(x: Tensor, weight: Tensor, inverse: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return launch_backward(x, weight, inverse, dy, None)


@_backward_op.register_fake
def _(x: Tensor, weight: Tensor, inverse: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None]:
    if dy is None:
        return None, None, None
    x, weight, inverse = ctx.saved_tensors
    return *_backward_op(x, weight, inverse, dy), None


_op.register_autograd(_gradients, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: Backend | Literal["apex"] = "auto") -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 or wider, rounded once.

    x `[…, d]`: kernels copy it unless each row is contiguous and all rows are equally far apart. weight `[d]` may have
    another data type. x and one number per row are saved for backward. backend: may be apex.
    """
    if backend == "apex":
        return apex.rms_norm(x, weight, eps)
    if use_triton(backend, x.device):
        return _op(x, weight, eps)[0]
    if x.is_cuda and weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _TorchRMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _torch(x, weight, eps)[0]


def bytes_moved(tokens: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward: x in, y out; by backward: x and dy in, dx out."""
    size = tokens * width * dtype.itemsize
    return 2 * size, 3 * size


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in models():
        x, weight = meta(TOKENS, shape.width, dtype=dtype), meta(shape.width, dtype=dtype)
        inverse = meta(TOKENS, dtype=torch.float32)
        yield CompileCase("rms_norm", model, dtype, partial(launch_forward, x, None, weight, 1e-5))
        yield CompileCase("rms_norm backward", model, dtype, partial(launch_backward, x, weight, inverse, x, None))
