"""SwiGLU and GEGLU (Shazeer 2020, arXiv 2002.05202), element by element; σ is the logistic function:

    y = a(g) · u        a(g) = g · σ(z)
    dg = dy · u · σ(z) · (1 + g · z' · (1 − σ(z)))        du = dy · a(g)
    SwiGLU: a is silu, z = g        GEGLU: a is gelu in its tanh form, z = √(8/π) · (g + 0.044715 · g³)

Only the two inputs are saved: backward computes a(g) again, which costs no memory traffic.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.backend import (
    Backend,
    Program,
    as_rows,
    jit,
    on_device,
    times,
    tl,
    use_triton,
    wide_dtype,
    widen,
)
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, models

THREAD_BYTES = 32  # per thread, of every tensor: two loads
WARPS = 4
Activation = Literal["silu", "gelu"]


def _activated(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def reference(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    wide = wide_dtype(gate.dtype)
    return (_activated(gate.to(wide), activation) * up.to(wide)).to(gate.dtype)


class _TorchSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return times(_activated(gate, activation), up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if ctx.activation == "silu":
            of_gate = torch.ops.aten.silu_backward(grad * up, gate)
        else:
            of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return of_gate, times(_activated(gate, ctx.activation), grad), None


@jit
def _inner(g, SLOPE: tl.constexpr, GELU: tl.constexpr):
    """z, or g · z' where SLOPE is 3 instead of 1."""
    if GELU:
        g *= 1.5957691216057308 * (1 + SLOPE * 0.044715 * g * g)
    return g


@jit
def _swiglu_forward(Gate, Up, Y, width, gate_stride, up_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = widen(tl.load(Gate + row * gate_stride + columns, mask=columns < width, other=0.0))
    u = widen(tl.load(Up + row * up_stride + columns, mask=columns < width, other=0.0))
    y = g / (1 + tl.exp(-_inner(g, 1, GELU))) * u
    tl.store(Y + row * width + columns, y.to(Y.dtype.element_ty), mask=columns < width)


@jit
def _swiglu_backward(
    Gate, Up, DY, Grads, width, gate_stride, up_stride, dy_stride, GELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of Grads are those of both gradients, one behind the other."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = widen(tl.load(Gate + row * gate_stride + columns, mask=columns < width, other=0.0))
    u = widen(tl.load(Up + row * up_stride + columns, mask=columns < width, other=0.0))
    dy = widen(tl.load(DY + row * dy_stride + columns, mask=columns < width, other=0.0))
    sigmoid = 1 / (1 + tl.exp(-_inner(g, 1, GELU)))
    dgate = dy * u * sigmoid * (1 + _inner(g, 3, GELU) * (1 - sigmoid))
    Grads += row * 2 * width + columns
    tl.store(Grads, dgate.to(Grads.dtype.element_ty), mask=columns < width)
    tl.store(Grads + width, (dy * g * sigmoid).to(Grads.dtype.element_ty), mask=columns < width)


def program_for(itemsize: int) -> Program:
    """The size of programs for elements of `itemsize` bytes."""
    return Program(32 * WARPS * THREAD_BYTES // itemsize, WARPS)


@on_device
def launch_forward(gate: Tensor, up: Tensor, program: Program | None = None, activation: Activation = "silu") -> Tensor:
    y = gate.new_empty(gate.shape)
    block, warps = program or program_for(gate.itemsize)
    flat = gate.is_contiguous() and up.is_contiguous()  # one long row
    gates, ups = (x.view(1, -1) if flat else as_rows(x) for x in (gate, up))
    count, width = gates.shape
    if programs := count * -(-width // block):
        _swiglu_forward[(programs,)](
            gates, ups, y, width, gates.stride(0), ups.stride(0), GELU=activation == "gelu", BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
    return y


@on_device
def launch_backward(
    gate: Tensor, up: Tensor, dy: Tensor, program: Program | None = None, activation: Activation = "silu"
) -> Tensor:
    """Gradients of gate and up in one tensor `[…, 2f]`, so that one matrix product can take both."""
    grads = gate.new_empty(*gate.shape[:-1], 2 * gate.shape[-1])
    block, warps = program or program_for(gate.itemsize)
    gates, ups, dys = map(as_rows, (gate, up, dy))
    count, width = gates.shape
    if programs := count * -(-width // block):
        _swiglu_backward[(programs,)](
            gates, ups, dys, grads, width, gates.stride(0), ups.stride(0), dys.stride(0),
            GELU=activation == "gelu", BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return grads


@torch.library.custom_op("megalite::swiglu", mutates_args=())
def _op(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    return launch_forward(gate, up, activation="gelu" if gelu else "silu")


@_op.register_fake
def _(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("megalite::swiglu_backward", mutates_args=())
def _backward_op(gate: Tensor, up: Tensor, dy: Tensor, gelu: bool) -> Tensor:
    return launch_backward(gate, up, dy, activation="gelu" if gelu else "silu")


@_backward_op.register_fake
def _(gate: Tensor, up: Tensor, dy: Tensor, gelu: bool) -> Tensor:
    return gate.new_empty(*gate.shape[:-1], 2 * gate.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.gelu = inputs[2]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_op(*ctx.saved_tensors, dy, ctx.gelu).chunk(2, dim=-1), None


_op.register_autograd(_gradients, setup_context=_save)


def swiglu(gate: Tensor, up: Tensor, backend: Backend = "auto", activation: Activation = "silu") -> Tensor:
    """silu(gate) · up, element by element; both `[…, f]`, of one shape and data type.

    activation: gelu makes it GEGLU, gelu(gate) · up, with the tanh form of gelu.

    Kernels read tensors in place if each row is contiguous and rows are equally far apart, as in halves of a wider
    tensor. Otherwise they read a contiguous copy.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype} "
            "must be of one shape and type"
        )
    if use_triton(backend, gate.device):
        return _op(gate, up, activation == "gelu")
    if torch.is_grad_enabled():
        return _TorchSwiGLU.apply(gate, up, activation)
    return times(_activated(gate, activation), up)


@torch.library.custom_op("megalite::swiglu_of_halves", mutates_args=())
def _op_of_halves(both: Tensor, gelu: bool) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return launch_forward(gate, up, activation="gelu" if gelu else "silu")


@_op_of_halves.register_fake
def _(both: Tensor, gelu: bool) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


def _save_halves(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
    both, ctx.gelu = inputs
    ctx.save_for_backward(both)


def _gradient_of_halves(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (both,) = ctx.saved_tensors
    gate, up = both.chunk(2, dim=-1)
    return _backward_op(gate, up, dy, ctx.gelu), None


_op_of_halves.register_autograd(_gradient_of_halves, setup_context=_save_halves)


def swiglu_of_halves(both: Tensor, backend: Backend = "auto", activation: Activation = "silu") -> Tensor:
    """`swiglu` of gate and up that are the halves of one tensor `[…, 2f]`, as is their gradient.

    Autograd would put gradients of halves together by a copy, where it does not see that they lie side by side.
    """
    if both.shape[-1] % 2:
        raise ValueError(f"swiglu_of_halves: {list(both.shape)} has no halves; its last size must be even")
    if use_triton(backend, both.device):
        return _op_of_halves(both, activation == "gelu")
    gate, up = both.chunk(2, dim=-1)
    return swiglu(gate, up, backend, activation)


def bytes_moved(tokens: int, ffn: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward: gate and up in, y out; by backward: gate, up and dy in, both gradients out."""
    size = tokens * ffn * dtype.itemsize
    return 3 * size, 5 * size


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in models():
        x = meta(TOKENS, shape.ffn, dtype=dtype)
        yield CompileCase("swiglu", model, dtype, partial(launch_forward, x, x))
        yield CompileCase("swiglu backward", model, dtype, partial(launch_backward, x, x, x))
        gelu = {"activation": "gelu"}
        yield CompileCase("swiglu, gelu", model, dtype, partial(launch_forward, x, x, **gelu))
        yield CompileCase("swiglu, gelu backward", model, dtype, partial(launch_backward, x, x, x, **gelu))
        fused = meta(TOKENS, 2 * shape.ffn, dtype=dtype)
        gate, up = fused.chunk(2, dim=1)
        yield CompileCase("swiglu of halves", model, dtype, partial(launch_forward, gate, up))
