"""SwiGLU of rows that each count with a score of their own, as in a mixture of experts:

    y = s · silu(g) · u        ds = Σ dy · silu(g) · u        with g and u: s · dy instead of dy, as in `swiglu`

The score is applied before an expert's last matrix, so that nothing of what that returns is needed for its gradient.
In backward one program has whole rows, so that the sums of their products need no second pass and no atomics.

The clamped form is that of gpt-oss (arXiv 2508.10925), with g' = min(g, 7) and u' = max(min(u, 7), −7). Numbers beyond
these ends have no gradient:

    y = s · g' · sigmoid(1.702 g') · (u' + 1)
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

LIMIT, SLOPE = 7.0, 1.702  # the clamped form's; kernels have them as numbers


def reference(gate: Tensor, up: Tensor, scores: Tensor, clamped: bool = False) -> Tensor:
    wide = wide_dtype(gate.dtype)
    g, u = gate.to(wide), up.to(wide)
    if clamped:
        g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT) + 1
    silu = g * torch.sigmoid(SLOPE * g) if clamped else F.silu(g)
    return (silu * u * scores[:, None].to(wide)).to(gate.dtype)


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


class _TorchClamped(torch.autograd.Function):
    """The clamped form, by g' · sigmoid(1.702 g') = silu(1.702 g') / 1.702."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, scores)
        y = F.silu(gate.clamp(max=LIMIT).mul_(SLOPE), inplace=True)
        return y.mul_(up.clamp(-LIMIT, LIMIT).add_(1)).mul_(scores[:, None] / SLOPE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of gate, up and scores. The memory of the first two holds other tensors before."""
        gate, up, scores = ctx.saved_tensors
        aten, end = torch.ops.aten, LIMIT + 4 * torch.finfo(gate.dtype).eps  # the first number that is clamped
        of_up = F.silu(gate.clamp(max=LIMIT).mul_(SLOPE), inplace=True)
        of_gate = up.clamp(-LIMIT, LIMIT).add_(1).mul_(grad)
        of_scores = of_up.mul_(of_gate).sum(-1, dtype=scores.dtype).div_(SLOPE)
        bent = torch.clamp(gate, max=LIMIT, out=of_up).mul_(SLOPE)
        aten.silu_backward.grad_input(of_gate.mul_(scores[:, None]), bent, grad_input=of_gate)
        aten.hardtanh_backward.grad_input(of_gate, gate, -torch.inf, end, grad_input=of_gate)
        F.silu(bent, inplace=True).mul_(grad).mul_(scores[:, None] / SLOPE)
        aten.hardtanh_backward.grad_input(of_up, up, -end, end, grad_input=of_up)
        return of_gate, of_up, of_scores


@jit
def _clamped(g, u):
    """Numbers in the place of g and u in the clamped form. NaN stays."""
    return tl.where(g > 7.0, 7.0, g), tl.where(u > 7.0, 7.0, tl.where(u < -7.0, -7.0, u)) + 1


@jit
def _weighted_swiglu_forward(
    Gate, Up, Scores, Y, Count, count, width, gate_stride, up_stride,
    CLAMPED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if Count is not None:
        count = tl.load(Count)
    tiles = tl.cdiv(width, TILE)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)[None, :]
    inside = (rows < count)[:, None] & (columns < width)
    g = widen(tl.load(Gate + rows[:, None] * gate_stride + columns, mask=inside, other=0.0))
    u = widen(tl.load(Up + rows[:, None] * up_stride + columns, mask=inside, other=0.0))
    if CLAMPED:
        g, u = _clamped(g, u)
        sigmoid = 1 / (1 + tl.exp(-1.702 * g))
        y = g * sigmoid * u * tl.load(Scores + rows, mask=rows < count, other=0.0)[:, None]
    else:
        y = g / (1 + tl.exp(-g)) * u * tl.load(Scores + rows, mask=rows < count, other=0.0)[:, None]
    tl.store(Y + rows[:, None] * width + columns, y.to(Y.dtype.element_ty), mask=inside)


@jit
def _weighted_swiglu_backward(
    Gate, Up, Scores, DY, Grads, DScores, Count, count, width, gate_stride, up_stride, dy_stride,
    CLAMPED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of Grads are those of gate's and up's gradients, one behind the other."""
    if Count is not None:
        count = tl.load(Count)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scores = tl.load(Scores + rows, mask=rows < count, other=0.0)[:, None]
    sums = tl.zeros([ROWS, TILE], DScores.dtype.element_ty)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)[None, :]
        inside = (rows < count)[:, None] & (columns < width)
        g = widen(tl.load(Gate + rows[:, None] * gate_stride + columns, mask=inside, other=0.0))
        u = widen(tl.load(Up + rows[:, None] * up_stride + columns, mask=inside, other=0.0))
        dy = widen(tl.load(DY + rows[:, None] * dy_stride + columns, mask=inside, other=0.0))
        if CLAMPED:
            beyond, outside = g > 7.0, (u > 7.0) | (u < -7.0)
            g, u = _clamped(g, u)
            bent = 1.702 * g
        else:
            bent = g
        sigmoid = 1 / (1 + tl.exp(-bent))
        sums += dy * g * sigmoid * u
        dy *= scores
        dgate, dup = dy * u * sigmoid * (1 + bent * (1 - sigmoid)), dy * g * sigmoid
        if CLAMPED:
            dgate, dup = tl.where(beyond, 0.0, dgate), tl.where(outside, 0.0, dup)
        into = Grads + rows[:, None] * 2 * width + columns
        tl.store(into, dgate.to(Grads.dtype.element_ty), mask=inside)
        tl.store(into + width, dup.to(Grads.dtype.element_ty), mask=inside)
    tl.store(DScores + rows, tl.sum(sums, 1), mask=rows < count)


@on_device
def launch_forward(
    gate: Tensor, up: Tensor, scores: Tensor, clamped: bool = False, rows: Tensor | None = None
) -> Tensor:
    y = gate.new_empty(gate.shape)
    gates, ups = map(as_rows, (gate, up))
    count, width = gates.shape
    block = row_block(width, program_for(gate.itemsize))
    if programs := -(-count // block["ROWS"]) * -(-width // block["TILE"]):
        _weighted_swiglu_forward[(programs,)](
            gates, ups, scores.contiguous(), y, rows, count, width, gates.stride(0), ups.stride(0),
            CLAMPED=clamped, **block,
        )  # fmt: skip
    return y


@on_device
def launch_backward(
    gate: Tensor, up: Tensor, scores: Tensor, dy: Tensor, clamped: bool = False, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up in one tensor `[n, 2f]`, so that one matrix product can take both; those of scores."""
    grads, of_scores = gate.new_empty(len(gate), 2 * gate.shape[1]), scores.new_empty(scores.shape)
    gates, ups, dys = map(as_rows, (gate, up, dy))
    count, width = gates.shape
    block = row_block(width, program_for(gate.itemsize))
    if programs := -(-count // block["ROWS"]):
        _weighted_swiglu_backward[(programs,)](
            gates, ups, scores.contiguous(), dys, grads, of_scores, rows, count, width,
            gates.stride(0), ups.stride(0), dys.stride(0), CLAMPED=clamped, **block,
        )  # fmt: skip
    return grads, of_scores


@torch.library.custom_op("megalite::weighted_swiglu", mutates_args=())
def _op(gate: Tensor, up: Tensor, scores: Tensor, clamped: bool, rows: Tensor | None = None) -> Tensor:
    return launch_forward(gate, up, scores, clamped, rows)


@_op.register_fake
def _(gate: Tensor, up: Tensor, scores: Tensor, clamped: bool, rows: Tensor | None = None) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("megalite::weighted_swiglu_backward", mutates_args=())
def _backward_op(
    gate: Tensor, up: Tensor, scores: Tensor, dy: Tensor, clamped: bool, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return launch_backward(gate, up, scores, dy, clamped, rows)


@_backward_op.register_fake
def _(
    gate: Tensor, up: Tensor, scores: Tensor, dy: Tensor, clamped: bool, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1]), scores.new_empty(scores.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool, Tensor | None], output: Tensor) -> None:
    *given, ctx.clamped, ctx.rows = inputs
    ctx.save_for_backward(*given)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    grads, of_scores = _backward_op(*ctx.saved_tensors, dy, ctx.clamped, ctx.rows)
    return *grads.chunk(2, dim=-1), of_scores, None, None


_op.register_autograd(_gradients, setup_context=_save)


def weighted_swiglu(
    gate: Tensor,
    up: Tensor,
    scores: Tensor,
    backend: Backend = "auto",
    clamped: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """scores · silu(gate) · up: gate and up `[n, f]` of one data type, scores `[n]` in float32, or float64 as these.

    clamped: in the form of gpt-oss, see above. rows: a number on the device, `[1]`; kernels neither read nor write rows
    from that one on. With kernels, the gradients of gate and up are halves of one tensor `[n, 2f]`. They read gate and
    up in place where `swiglu` does.
    """
    wide = wide_dtype(gate.dtype)
    if up.shape != gate.shape or scores.shape != gate.shape[:1] or (up.dtype, scores.dtype) != (gate.dtype, wide):
        raise ValueError(
            f"weighted_swiglu: gate {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype} must be of one "
            f"shape and type, and scores {list(scores.shape)} {scores.dtype} as many as rows, in {wide}"
        )
    if use_triton(backend, gate.device):
        return _op(gate, up, scores, clamped, rows)
    weighted: Tensor = (_TorchClamped if clamped else _TorchWeightedSwiGLU).apply(gate, up, scores)
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
        if model.startswith("gpt-oss"):
            clamped = partial(launch_forward, x, x, scores, True), partial(launch_backward, x, x, scores, x, True)
            yield CompileCase("weighted_swiglu, clamped", model, dtype, clamped[0])
            yield CompileCase("weighted_swiglu backward, clamped", model, dtype, clamped[1])
        if model.startswith("Qwen3"):
            number = meta(1, dtype=torch.int32)
            some = partial(launch_forward, rows=number), partial(launch_backward, rows=number)
            yield CompileCase("weighted_swiglu, fewer rows", model, dtype, partial(some[0], x, x, scores))
            yield CompileCase("weighted_swiglu backward, fewer rows", model, dtype, partial(some[1], x, x, scores, x))
