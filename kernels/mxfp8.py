"""Casts of matrices to MXFP8: e4m3, with a scale of its own for every 32 numbers along a row or a column.

    q = round(x / scale)        x ≈ q · scale        scale = 2ᵏ, the smallest with amax / 2ᵏ ≤ 448

Formats are those of the OCP Microscaling Formats specification 1.0. A scale is a byte of e8m0, k + 127; 255 is NaN, and
so is a block with a number that is not finite. A block of zeros has the least scale, 2⁻¹²⁷. The specification proposes
to round the scale down, which lets numbers above 448 · scale saturate. Here it is rounded up: in Mishra et al. 2025,
"Recipes for Pre-training LLMs with MXFP8" (arXiv 2506.08027), pre-training can diverge with the former, and matches
bfloat16 with the latter. The same paper takes e4m3 for gradients, too: 32 numbers need no more exponents.

A product sums over one dimension, along which both of its operands must have their blocks. So a matrix that is in two
products is cast twice, by rows and by columns (transposed), in one pass.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalite_kernels.backend import Backend, as_rows, jit, on_device, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, models
from megalite_kernels.float8 import ACTIVATION, float8_bits

BLOCK = 32  # numbers that share a scale
TILE = 128, 4  # rows and columns of scales in a tile of a GPU's layout
WARPS = 16


def scales_of(x: Tensor) -> Tensor:
    """The scales `[n, d / 32]` of the rows of x `[n, d]`, as bytes of e8m0."""
    sizes = x.detach().to(torch.float32).view(torch.int32) & 0x7FFFFFFF  # in the order of numbers, NaN above all
    largest = sizes.unflatten(-1, (-1, BLOCK)).amax(-1)
    code = (((largest + 0x1FFFFF) >> 23) - 8).clamp(min=0)  # one more where the mantissa is above that of 448
    return code.masked_fill(largest >= 0x7F800000, 255).to(torch.uint8)


def factors(scales: Tensor) -> Tensor:
    """The numbers that scales stand for, as float32."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def wide(values: Tensor, scales: Tensor) -> Tensor:
    """The numbers that values `[n, d]` in e4m3 with their scales stand for, as float32, which holds them exactly."""
    blocks = values.to(torch.float32).unflatten(-1, (-1, BLOCK))
    return (blocks * factors(scales).unsqueeze(-1)).flatten(-2)


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[n, d]` in e4m3, and its scales."""
    scales = scales_of(x)
    blocks = x.to(wide_dtype(x.dtype)).unflatten(-1, (-1, BLOCK)) * factors(scales).reciprocal().unsqueeze(-1)
    most = torch.finfo(ACTIVATION).max
    return blocks.flatten(-2).clamp(-most, most).to(ACTIVATION), scales


def tiled(scales: Tensor) -> Tensor:
    """Scales `[n, k]` as GPUs read them: tiles of 128 rows and 4 columns one behind the other, row of tiles by row.

    In a tile, rows r, r + 32, r + 64 and r + 96 lie together, with 4 scales of each (cuBLAS documentation, "1D Block
    Scaling Factors Layout"; PyTorch: SWIZZLE_32_4_4). The last tiles are filled up with 0.
    """
    (n, k), (height, width) = scales.shape, TILE
    whole = F.pad(scales, (0, -k % width, 0, -n % height)) if k % width or n % height else scales
    tiles = whole.view(-(-n // height), 4, 32, -(-k // width), width)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


@jit
def _mx_scale(largest):
    """The scales of blocks, from the bits of their largest numbers in float32."""
    code = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 0)
    return tl.where(largest >= 0x7F800000, 255, code)


@jit
def _mx_factor(code):
    """The numbers that scales stand for."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def _mx_inverse(code):
    """The inverses of the numbers that scales stand for."""
    return tl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(tl.float32, bitcast=True)


@jit
def _e4m3_number(code):
    """The numbers that bits of e4m3 stand for, in float32."""
    size = code & 0x7F
    bits = ((size << 20) + (120 << 23)) | ((code & 0x80) << 24)
    normal = tl.where(size == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    subnormal = tl.where(code > 0x7F, -0.001953125, 0.001953125) * size.to(tl.float32)
    return tl.where(size < 8, subnormal, normal)


@jit
def _mx_cast(
    X, Given, Rows, Columns, OfRows, OfColumns, rows, columns, stride,
    NARROW: tl.constexpr, BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr, TILED: tl.constexpr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """NARROW: x is in e4m3 with the scales Given by rows. A program makes one tile of scales of each layout."""
    across, down = tl.cdiv(columns, SIZE), tl.cdiv(rows, SIZE)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    place, part = tl.arange(0, SIZE), tl.arange(0, PARTS)
    row, column = i.to(tl.int64) * SIZE + place, j.to(tl.int64) * SIZE + place
    of_row, of_column = i * PARTS + part, j * PARTS + part  # blocks of a column, and of a row
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(X + row[:, None] * stride + column[None, :], mask=inside, other=0)
    if NARROW:
        known = (row < rows)[:, None] & (of_column < columns // BLOCK)[None, :]
        given = tl.load(Given + row[:, None] * (columns // BLOCK) + of_column[None, :], mask=known, other=0)
        number = tl.reshape(_e4m3_number(x.to(tl.int32)), (SIZE, PARTS, BLOCK))
        x = tl.reshape(number * _mx_factor(given.to(tl.int32))[:, :, None], (SIZE, SIZE))
    else:
        x = widen(x)
    size = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    inner = (place % 32) * 16 + (place // 32) * 4
    if BY_ROWS:
        code = _mx_scale(tl.max(tl.reshape(size, (SIZE, PARTS, BLOCK)), 2))
        scaled = tl.reshape(x, (SIZE, PARTS, BLOCK)) * _mx_inverse(code)[:, :, None]
        narrow = float8_bits(tl.reshape(scaled, (SIZE, SIZE)).to(tl.float32), False)
        tl.store(Rows + row[:, None] * columns + column[None, :], narrow, mask=inside)
        if TILED:
            at = (i.to(tl.int64) * across + j) * (SIZE * PARTS) + inner[:, None] + part[None, :]
            tl.store(OfRows + at, code.to(tl.uint8))
        else:
            known = (row < rows)[:, None] & (of_column < columns // BLOCK)[None, :]
            at = row[:, None] * (columns // BLOCK) + of_column[None, :]
            tl.store(OfRows + at, code.to(tl.uint8), mask=known)
    if BY_COLUMNS:
        code = _mx_scale(tl.max(tl.reshape(size, (PARTS, BLOCK, SIZE)), 1))
        scaled = tl.reshape(x, (PARTS, BLOCK, SIZE)) * _mx_inverse(code)[:, None, :]
        narrow = float8_bits(tl.reshape(scaled, (SIZE, SIZE)).to(tl.float32), False)
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(Columns + column[:, None] * rows + row[None, :], tl.trans(narrow), mask=turned)
        if TILED:
            at = (j.to(tl.int64) * down + i) * (SIZE * PARTS) + inner[None, :] + part[:, None]
            tl.store(OfColumns + at, code.to(tl.uint8))
        else:
            known = (column < columns)[None, :] & (of_row < rows // BLOCK)[:, None]
            at = column[None, :] * (rows // BLOCK) + of_row[:, None]
            tl.store(OfColumns + at, code.to(tl.uint8), mask=known)


def _shapes(n: int, d: int, in_tiles: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a matrix and of its scales."""
    if in_tiles:
        return (n, d), (-(-n // TILE[0]) * -(-d // (TILE[1] * BLOCK)) * TILE[0] * TILE[1],)
    return (n, d), (n, d // BLOCK)


def _empty(x: Tensor, by_rows: bool, by_columns: bool, in_tiles: bool) -> list[Tensor]:
    """Space for the layouts that are asked for, each with its scales."""
    (n, d), found = x.shape, list[Tensor]()
    for shape in [(n, d)] * by_rows + [(d, n)] * by_columns:
        of_values, of_scales = _shapes(*shape, in_tiles)
        found += [x.new_empty(of_values, dtype=ACTIVATION), x.new_empty(of_scales, dtype=torch.uint8)]
    return found


@on_device
def launch_cast(x: Tensor, given: Tensor | None, by_rows: bool, by_columns: bool, in_tiles: bool) -> list[Tensor]:
    x, size = as_rows(x), TILE[0]
    made, (n, d) = _empty(x, by_rows, by_columns, in_tiles), x.shape
    if programs := -(-n // size) * -(-d // size):
        rows, of_rows, columns, of_columns = (each.view(torch.uint8) for each in (made * 2 if len(made) == 2 else made))
        _mx_cast[(programs,)](
            x if given is None else x.view(torch.uint8), x if given is None else given,
            rows, columns, of_rows, of_columns, n, d, x.stride(0),
            NARROW=given is not None, BY_ROWS=by_rows, BY_COLUMNS=by_columns, TILED=in_tiles,
            SIZE=size, PARTS=TILE[1], BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return made


@torch.library.custom_op("megalite::mxfp8_cast", mutates_args=())
def _op(x: Tensor, given: Tensor | None, by_rows: bool, by_columns: bool, in_tiles: bool) -> list[Tensor]:
    return launch_cast(x, given, by_rows, by_columns, in_tiles)


@_op.register_fake
def _(x: Tensor, given: Tensor | None, by_rows: bool, by_columns: bool, in_tiles: bool) -> list[Tensor]:
    return _empty(x, by_rows, by_columns, in_tiles)


def cast(
    x: Tensor,
    given: Tensor | None = None,
    by_rows: bool = False,
    by_columns: bool = False,
    in_tiles: bool = False,
    backend: Backend = "auto",
) -> list[Tensor]:
    """x `[n, d]` in MXFP8, by rows as `[n, d]`, by columns as `[d, n]`, both contiguous, each with its scales.

    given: scales `[n, d / 32]` by rows of an x that is in MXFP8 already. in_tiles: scales lie as GPUs read them (see
    `tiled`), and not as `[n, d / 32]` and `[d, n / 32]`. Without gradients. Raises ValueError for rows or columns that
    are no whole blocks.
    """
    n, d = x.shape
    if ((by_rows or given is not None) and d % BLOCK) or (by_columns and n % BLOCK):
        raise ValueError(f"a matrix of {n} × {d} has no whole blocks of {BLOCK}; use multiples of it")
    if use_triton(backend, x.device) or isinstance(x, FakeTensor):  # where memory is counted, it is the kernel's
        return _op(x, given, by_rows, by_columns, in_tiles)
    exact = x if given is None else wide(x, given)
    found = [reference(each) for each in [exact] * by_rows + [exact.t()] * by_columns]
    return [
        each
        for values, scales in found
        for each in (values.contiguous(), tiled(scales) if in_tiles else scales.contiguous())
    ]


def bytes_moved(rows: int, columns: int, dtype: torch.dtype, layouts: int = 2) -> int:
    """Bytes moved by a cast from `dtype` to as many layouts: the matrix in, each of them out, with its scales."""
    return rows * columns * (dtype.itemsize + layouts) + layouts * rows * columns // BLOCK


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in models():
        x = meta(TOKENS, shape.ffn, dtype=dtype)
        for name, by_rows, by_columns in (("input", True, False), ("both ways", True, True), ("turned", False, True)):
            launch = partial(launch_cast, x, None, by_rows, by_columns, by_columns)
            yield CompileCase(f"mxfp8, {name}", model, dtype, launch)
        narrow, scales = meta(TOKENS, shape.ffn, dtype=ACTIVATION), meta(TOKENS, shape.ffn // BLOCK, dtype=torch.uint8)
        yield CompileCase("mxfp8, kept", model, ACTIVATION, partial(launch_cast, narrow, scales, False, True, True))
