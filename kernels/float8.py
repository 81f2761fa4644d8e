"""Casts of matrices to 8-bit floating point, by rows, by columns (transposed), or both in one pass:

    q = round(clamp(x · scale))        x ≈ q / scale        scale = 2ᵏ, the largest with amax · 2ᵏ ≤ the largest q

Values and weights are in e4m3, which ends at 448, gradients in e5m2, which ends at 57344. Rounding is to nearest, ties
to even; what is too large becomes the largest number, and NaN stays NaN. Scales are powers of 2, so that scaling itself
rounds nothing (as the scales of MXFP8, and those of torchao's rowwise recipe). A scale is one for the whole matrix, or
one for each row of the layout by rows and one for each column of that by columns.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalite_kernels.backend import Backend, as_rows, jit, on_device, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, models

ACTIVATION, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100  # an amax below it counts as it, so that scales and their inverses are finite
TILE = 128, 64  # rows and columns of a program
WARPS = 4


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest absolute value, as float32; 0 without elements, NaN if x has one.

    dim: of each slice along it, which is kept with size 1; None: of all elements, without dimensions.
    """
    if x.numel() == 0:
        return torch.zeros_like(x.sum(dim, keepdim=True) if dim is not None else x.sum(), dtype=torch.float32)
    return torch.linalg.vector_norm(x.detach(), torch.inf, dim, keepdim=dim is not None).float()


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of 2 that brings `largest`, a float32, just below the largest number of `dtype`.

    It is 0 where `largest` is infinite, so that this becomes NaN in the end, as elsewhere.
    """
    exact = torch.finfo(dtype).max / largest.clamp(min=SMALLEST)
    return (exact.view(torch.int32) & 0x7F800000).view(torch.float32)  # the mantissa is cut off


def reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x times its scale in `dtype`. scale: float32, without dimensions, or such that it broadcasts."""
    most = torch.finfo(dtype).max
    return (x.to(wide_dtype(x.dtype)) * scale).clamp(-most, most).to(dtype)


@jit
def float8_bits(x, E5M2: tl.constexpr):
    """The bits of float32 numbers in 8 bits. Integer arithmetic is alike on all GPUs and in the interpreter."""
    SHIFT: tl.constexpr = 21 if E5M2 else 20  # bits of the mantissa that are rounded away
    BIAS: tl.constexpr = (112 << 2) if E5M2 else (120 << 3)  # difference of the exponents' biases
    LEAST: tl.constexpr = 0.00006103515625 if E5M2 else 0.015625  # the least normal number
    UNIT: tl.constexpr = 128.0 if E5M2 else 16384.0  # its last bit counts subnormal numbers
    UNIT_BITS: tl.constexpr = 0x43000000 if E5M2 else 0x46800000
    MOST: tl.constexpr = 0x7B if E5M2 else 0x7E
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - BIAS
    subnormal = (tl.abs(x) + UNIT).to(tl.int32, bitcast=True) - UNIT_BITS
    code = tl.minimum(tl.where(tl.abs(x) < LEAST, subnormal, normal), MOST)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def _float8_cast(
    X, ScaleOfRows, ScaleOfColumns, Rows, Columns, rows, columns, stride,
    E5M2: tl.constexpr, SCALES: tl.constexpr, BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """SCALES: 0: none, as x is in 8 bits; 1: one, that of rows; 2: one for each row, and one for each column."""
    across = tl.cdiv(columns, WIDTH)
    row = (tl.program_id(0) // across).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = (tl.program_id(0) % across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(X + row[:, None] * stride + column[None, :], mask=inside, other=0)
    if SCALES == 1:
        x = float8_bits((widen(x) * tl.load(ScaleOfRows)).to(tl.float32), E5M2)
    if BY_ROWS:
        by_rows = x
        if SCALES == 2:
            scale = tl.load(ScaleOfRows + row, mask=row < rows, other=0)
            by_rows = float8_bits((widen(x) * scale[:, None]).to(tl.float32), E5M2)
        tl.store(Rows + row[:, None] * columns + column[None, :], by_rows, mask=inside)
    if BY_COLUMNS:
        by_columns = x
        if SCALES == 2:
            scale = tl.load(ScaleOfColumns + column, mask=column < columns, other=0)
            by_columns = float8_bits((widen(x) * scale[None, :]).to(tl.float32), E5M2)
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(Columns + column[:, None] * rows + row[None, :], tl.trans(by_columns), mask=turned)


@on_device
def launch_cast(x: Tensor, dtype: torch.dtype, of_rows: Tensor | None, of_columns: Tensor | None) -> list[Tensor]:
    x = as_rows(x)
    n, d = x.shape
    rows = x.new_empty((0,) if of_rows is None else (n, d), dtype=dtype)
    columns = x.new_empty((0,) if of_columns is None else (d, n), dtype=dtype)
    _launch(x, of_rows, of_columns, rows, columns)
    return [each for each, scale in ((rows, of_rows), (columns, of_columns)) if scale is not None]


@on_device
def launch_transpose(x: Tensor) -> Tensor:
    columns = x.new_empty(x.shape[::-1])
    _launch(x.view(torch.uint8), None, None, columns[:0], columns)
    return columns


def _launch(x: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, rows: Tensor, columns: Tensor) -> None:
    (n, d), (height, width) = x.shape, TILE
    scales = [scale for scale in (of_rows, of_columns) if scale is not None]
    if programs := -(-n // height) * -(-d // width):
        _float8_cast[(programs,)](
            x, *(scales * 2)[:2] or (x, x), rows.view(torch.uint8), columns.view(torch.uint8), n, d, x.stride(0),
            E5M2=columns.dtype == GRADIENT, SCALES=0 if not scales else 2 if scales[0].ndim else 1,
            BY_ROWS=rows.numel() > 0, BY_COLUMNS=columns.numel() > 0,
            HEIGHT=height, WIDTH=width, num_warps=WARPS,
        )  # fmt: skip


@torch.library.custom_op("megalite::float8_cast", mutates_args=())
def _op(x: Tensor, dtype: torch.dtype, of_rows: Tensor | None, of_columns: Tensor | None) -> list[Tensor]:
    return launch_cast(x, dtype, of_rows, of_columns)


@_op.register_fake
def _(x: Tensor, dtype: torch.dtype, of_rows: Tensor | None, of_columns: Tensor | None) -> list[Tensor]:
    n, d = x.shape
    shapes = [(n, d)] * (of_rows is not None) + [(d, n)] * (of_columns is not None)
    return [x.new_empty(shape, dtype=dtype) for shape in shapes]


@torch.library.custom_op("megalite::float8_transpose", mutates_args=())
def _transpose_op(x: Tensor) -> Tensor:
    return launch_transpose(x)


@_transpose_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


def cast(
    x: Tensor,
    dtype: torch.dtype,
    of_rows: Tensor | None,
    of_columns: Tensor | None = None,
    backend: Backend = "auto",
) -> list[Tensor]:
    """`[n, d]` times its scale, in `dtype`: by rows as `[n, d]`, by columns as `[d, n]`, both contiguous.

    of_rows, of_columns: scale of each layout, or None where it is not wanted: float32, without dimensions, and then the
    same for both; or `[n, 1]` and `[1, d]`. Without gradients.
    """
    if use_triton(backend, x.device) or isinstance(x, FakeTensor):  # where memory is counted, it is the kernel's
        return _op(x, dtype, of_rows, of_columns)
    rows = [] if of_rows is None else [reference(x, of_rows, dtype)]
    return rows if of_columns is None else [*rows, reference(x, of_columns, dtype).t().contiguous()]


def transpose(x: Tensor, backend: Backend = "auto") -> Tensor:
    """A contiguous transposed copy `[d, n]` of a contiguous `[n, d]` in 8 bits."""
    return _transpose_op(x) if use_triton(backend, x.device) else x.t().contiguous()


def bytes_moved(rows: int, columns: int, dtype: torch.dtype, layouts: int = 2) -> int:
    """Bytes moved by a cast from `dtype` to as many layouts: the matrix in, each of them out."""
    return rows * columns * (dtype.itemsize + layouts)


def compile_cases() -> Iterator[CompileCase]:
    scale = meta(dtype=torch.float32)
    for model, shape, dtype in models():
        x = meta(TOKENS, shape.ffn, dtype=dtype)
        rows, columns = (meta(*size, dtype=torch.float32) for size in ((TOKENS, 1), (1, shape.ffn)))
        for name, of_rows, of_columns in (
            ("input", scale, None),
            ("both ways", scale, scale),
            ("turned", None, scale),
            ("input by rows", rows, None),
            ("both ways by rows and columns", rows, columns),
            ("turned by columns", None, columns),
        ):
            for kind in (ACTIVATION, GRADIENT)[: 1 + (name == "both ways")]:
                launch = partial(launch_cast, x, kind, of_rows, of_columns)
                yield CompileCase(f"float8, {name}, {str(kind)[13:17]}", model, dtype, launch)
        narrow = meta(TOKENS, shape.ffn, dtype=ACTIVATION)
        yield CompileCase("float8 transpose", model, ACTIVATION, partial(launch_transpose, narrow))
