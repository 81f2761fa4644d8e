"""SwiGLU of rows that each count with a score of their own, as in a mixture of experts:

    y = s · silu(g) · u        ds = Σ dy · silu(g) · u        with g and u: s · dy instead of dy, as in `swiglu`

The score is applied before an expert's last matrix, so that nothing of what that returns is needed for its gradient.
In backward one program has whole rows, so that the sums of their products need no second pass and no atomics.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.backend import Backend, as_rows, jit, on_device, row_block, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import CompileCase, meta, mixtures
from megalite_kernels.swiglu import program_for


def reference(gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
    wide = wide_dtype(gate.dtype)
    return (F.silu(gate.to(wide)) * up.to(wide) * scores[:, None].to(wide)).to(gate.dtype)


class _TorchWeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, scores)
        return F.silu(gate).mul_(up).mul_(scores[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, scores = ctx.saved_tensors
        silu = F.silu(gate)
        of_scores = (silu * up).mul_(grad).sum(-1, dtype=scores.dtype)
        weighted = grad.clone().mul_(scores[:, None])
        of_up = silu.mul_(weighted)
        weighted.mul_(up)
        return torch.ops.aten.silu_backward.grad_input(weighted, gate, grad_input=weighted), of_up, of_scores


@jit
def _weighted_swiglu_forward(
    Gate, Up, Scores, Y, count, width, gate_stride, up_stride, ROWS: tl.constexpr, TILE: tl.constexpr
):
    tiles = tl.cdiv(width, TILE)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)[None, :]
    inside = (rows < count)[:, None] & (columns < width)
    g = widen(tl.load(Gate + rows[:, None] * gate_stride + columns, mask=inside, other=0.0))
    u = widen(tl.load(Up + rows[:, None] * up_stride + columns, mask=inside, other=0.0))
    y = g / (1 + tl.exp(-g)) * u * tl.load(Scores + rows, mask=rows < count, other=0.0)[:, None]
    tl.store(Y + rows[:, None] * width + columns, y.to(Y.dtype.element_ty), mask=inside)


@jit
def _weighted_swiglu_backward(
    Gate, Up, Scores, DY, Grads, DScores, count, width, gate_stride, up_stride, dy_stride,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of Grads are those of gate's and up's gradients, one behind the other."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scores = tl.load(Scores + rows, mask=rows < count, other=0.0)[:, None]
    sums = tl.zeros([ROWS, TILE], DScores.dtype.element_ty)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)[None, :]
        inside = (rows < count)[:, None] & (columns < width)
        g = widen(tl.load(Gate + rows[:, None] * gate_stride + columns, mask=inside, other=0.0))
        u = widen(tl.load(Up + rows[:, None] * up_stride + columns, mask=inside, other=0.0))
        dy = widen(tl.load(DY + rows[:, None] * dy_stride + columns, mask=inside, other=0.0))
        sigmoid = 1 / (1 + tl.exp(-g))
        sums += dy * g * sigmoid * u
        dy *= scores
        dgate = dy * u * sigmoid * (1 + g * (1 - sigmoid))
        into = Grads + rows[:, None] * 2 * width + columns
        tl.store(into, dgate.to(Grads.dtype.element_ty), mask=inside)
        tl.store(into + width, (dy * g * sigmoid).to(Grads.dtype.element_ty), mask=inside)
    tl.store(DScores + rows, tl.sum(sums, 1), mask=rows < count)


@on_device
def launch_forward(gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
    y = gate.new_empty(gate.shape)
    gates, ups = map(as_rows, (gate, up))
    count, width = gates.shape
    block = row_block(width, program_for(gate.itemsize))
    if programs := -(-count // block["ROWS"]) * -(-width // block["TILE"]):
        _weighted_swiglu_forward[(programs,)](
            gates, ups, scores.contiguous(), y, count, width, gates.stride(0), ups.stride(0), **block
        )  # fmt: skip
    return y


@on_device
def launch_backward(gate: Tensor, up: Tensor, scores: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up in one tensor `[n, 2f]`, so that one matrix product can take both; those of scores."""
    grads, of_scores = gate.new_empty(len(gate), 2 * gate.shape[1]), scores.new_empty(scores.shape)
    gates, ups, dys = map(as_rows, (gate, up, dy))
    count, width = gates.shape
    block = row_block(width, program_for(gate.itemsize))
    if programs := -(-count // block["ROWS"]):
        _weighted_swiglu_backward[(programs,)](
            gates, ups, scores.contiguous(), dys, grads, of_scores, count, width,
            gates.stride(0), ups.stride(0), dys.stride(0), **block,
        )  # fmt: skip
    return grads, of_scores


@torch.library.custom_op("megalite::weighted_swiglu", mutates_args=())
def _op(gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
    return launch_forward(gate, up, scores)


@_op.register_fake
def _(gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("megalite::weighted_swiglu_backward", mutates_args=())
def _backward_op(gate: Tensor, up: Tensor, scores: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return launch_backward(gate, up, scores, dy)


@_backward_op.register_fake
def _(gate: Tensor, up: Tensor, scores: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1]), scores.new_empty(scores.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    grads, of_scores = _backward_op(*ctx.saved_tensors, dy)
    return *grads.chunk(2, dim=-1), of_scores


_op.register_autograd(_gradients, setup_context=_save)


def weighted_swiglu(gate: Tensor, up: Tensor, scores: Tensor, backend: Backend = "auto") -> Tensor:
    """scores · silu(gate) · up: gate and up `[n, f]` of one data type, scores `[n]` in float32, or float64 as these.

    With kernels, the gradients of gate and up are halves of one tensor `[n, 2f]`. They read gate and up in place where
    `swiglu` does.
    """
    wide = wide_dtype(gate.dtype)
    if up.shape != gate.shape or scores.shape != gate.shape[:1] or (up.dtype, scores.dtype) != (gate.dtype, wide):
        raise ValueError(
            f"weighted_swiglu: gate {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype} must be of one "
            f"shape and type, and scores {list(scores.shape)} {scores.dtype} as many as rows, in {wide}"
        )
    if use_triton(backend, gate.device):
        return _op(gate, up, scores)
    weighted: Tensor = _TorchWeightedSwiGLU.apply(gate, up, scores)
    return weighted


def bytes_moved(rows: int, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward: gate, up and scores in, y out; by backward: these and dy in, all gradients out."""
    size, scores = rows * hidden * dtype.itemsize, rows * wide_dtype(dtype).itemsize
    return 3 * size + scores, 5 * size + 2 * scores


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in mixtures():
        x, scores = meta(shape.rows, shape.hidden, dtype=dtype), meta(shape.rows, dtype=torch.float32)
        yield CompileCase("weighted_swiglu", model, dtype, partial(launch_forward, x, x, scores))
        yield CompileCase("weighted_swiglu backward", model, dtype, partial(launch_backward, x, x, scores, x))
