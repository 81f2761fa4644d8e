"""Symmetric products α·X Xᵀ + β·S, of which only the lower triangle is computed: about half of a product's operations.

A program computes one tile on or below the diagonal, and writes it and its mirror image. On the diagonal, elements
above it are mirrored too. So the result is symmetric to the last bit, whatever the order in which a device adds up. The
bits of a matrix do not depend on the others in a batch. Newton–Schulz needs two such products of three (`optim.muon`):
X Xᵀ, and b·A + c·A² with A symmetric, for which X is A.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite_kernels.backend import USES_INTERPRETER, Backend, jit, on_device, tl, use_triton, widen
from megalite_kernels.compile_cases import LLAMAS, CompileCase, meta

TILE = 128  # rows and columns of a program's part of the result
DEPTH = 64  # elements of the sum that are loaded at a time
STAGES = 4  # parts of a sum that are under way: 128 KiB of shared memory in bfloat16
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16)  # data types of the kernel; PyTorch multiplies others
MIN_ROWS = 3072  # rows of a matrix: of 2048, the triangle's 136 tiles are two waves on an H100, as long as one of all


def reference(x: Tensor, symmetric: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """The result in float64."""
    product = alpha * (x.double() @ x.double().mT)
    return product if symmetric is None else product + beta * symmetric.double()


@jit
def _symmetric_kernel(
    X, S, Y, size, depth, x_batch, x_row, x_column, alpha, beta,
    TILE: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of Y = alpha·X Xᵀ + beta·S of a matrix, and its mirror tile. S (or None), Y: contiguous."""
    number = tl.program_id(0)
    line = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)  # number is line·(line + 1)/2 + across
    line = tl.where(line * (line + 1) // 2 > number, line - 1, line)  # a root may be rounded either way
    line = tl.where((line + 1) * (line + 2) // 2 <= number, line + 1, line)
    across = number - line * (line + 1) // 2
    rows = line * TILE + tl.arange(0, TILE)
    columns = across * TILE + tl.arange(0, TILE)
    X += tl.program_id(1).to(tl.int64) * x_batch
    at = tl.arange(0, DEPTH)
    left = X + rows[:, None].to(tl.int64) * x_row + at[None, :] * x_column
    right = X + columns[None, :].to(tl.int64) * x_row + at[:, None] * x_column
    has_row, has_column = rows[:, None] < size, columns[None, :] < size
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, depth, DEPTH):
        left_is_inside = has_row & (at[None, :] < depth - start)
        right_is_inside = has_column & (at[:, None] < depth - start)
        a = tl.load(left, mask=left_is_inside, other=0.0)
        b = tl.load(right, mask=right_is_inside, other=0.0)
        if WIDE:
            a, b = widen(a), widen(b)
        total = tl.dot(a, b, total)
        left += DEPTH * x_column
        right += DEPTH * x_column
    total *= alpha
    inside = has_row & has_column
    first = tl.program_id(1).to(tl.int64) * size * size
    below = first + rows[:, None].to(tl.int64) * size + columns[None, :]
    if S is not None:
        total += beta * widen(tl.load(S + below, mask=inside, other=0.0))
    mirror = tl.trans(total)
    if line == across:
        total = tl.where(rows[:, None] >= columns[None, :], total, mirror)
    tl.store(Y + below, total.to(Y.dtype.element_ty), mask=inside)
    if line != across:
        above = first + columns[:, None].to(tl.int64) * size + rows[None, :]
        inside = (columns[:, None] < size) & (rows[None, :] < size)
        tl.store(Y + above, mirror.to(Y.dtype.element_ty), mask=inside)


@on_device
def launch_symmetric(x: Tensor, symmetric: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Launch the kernel. x: `[batch, rows, depth]`, of any strides; symmetric: contiguous, or none."""
    batch, rows, depth = x.shape
    result = x.new_empty(batch, rows, rows)
    tiles = -(-rows // TILE)
    _symmetric_kernel[(tiles * (tiles + 1) // 2, batch)](
        x, symmetric, result, rows, depth, *x.stride(), float(alpha), float(beta),
        TILE=TILE, DEPTH=DEPTH, WIDE=USES_INTERPRETER, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return result


@torch.library.custom_op("megalite::symmetric_product", mutates_args=())
def _op(x: Tensor, symmetric: Tensor | None, alpha: float, beta: float) -> Tensor:
    return launch_symmetric(x, None if symmetric is None else symmetric.contiguous(), alpha, beta)


@_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], x.shape[1])


def _plain(x: Tensor, symmetric: Tensor | None, alpha: float, beta: float) -> Tensor:
    if symmetric is None:
        return alpha * (x @ x.mT)
    return torch.baddbmm(symmetric, x, x.mT, beta=beta, alpha=alpha)


def runs_in_kernel(rows: int, dtype: torch.dtype, device: torch.device, backend: Backend = "auto") -> bool:
    """Return whether the kernel multiplies matrices of so many rows; with `auto`, PyTorch has the small ones."""
    return dtype in DTYPES and use_triton(backend, device) and (backend == "triton" or rows >= MIN_ROWS)


@torch.no_grad()
def symmetric_product(
    x: Tensor, symmetric: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0, backend: Backend = "auto"
) -> Tensor:
    """α·X Xᵀ + β·S `[..., rows, rows]` for X `[..., rows, depth]`, in the data type of X; sums are float32.

    symmetric: S `[..., rows, rows]`; the kernel reads its lower triangle only. Where the kernel runs, see
    `runs_in_kernel`, the result is symmetric to the last bit.
    """
    batch = x.shape[:-2].numel()
    stack = x.reshape(batch, *x.shape[-2:])
    added = None if symmetric is None else symmetric.reshape(batch, *symmetric.shape[-2:])
    in_kernel = x.numel() and runs_in_kernel(x.shape[-2], x.dtype, x.device, backend)
    result = (_op if in_kernel else _plain)(stack, added, alpha, beta)
    return result.view(*x.shape[:-1], x.shape[-2])


def compile_cases() -> Iterator[CompileCase]:
    for model, shape in LLAMAS.items():
        wide = meta(1, shape.width, shape.ffn, dtype=torch.bfloat16)
        tall = meta(1, shape.ffn, shape.width, dtype=torch.bfloat16).mT
        gram = meta(1, shape.width, shape.width, dtype=torch.bfloat16)
        for name, x, added in (("", wide, None), (" transposed", tall, None), (" added", gram, gram)):
            launch = partial(launch_symmetric, x, added, 1.0, 1.0)
            yield CompileCase(f"symmetric_product{name}", model, torch.bfloat16, launch)
