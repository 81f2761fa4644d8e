"""Residual addition and RMSNorm of the sum in one pass; the mathematics is that of `rms_norm`:

    t = x + y        n = RMSNorm(t) · w        dx = dy = dt + RMSNorm's gradient of n at t

Both t and n are returned: t continues the residual stream, and n is the next layer's input. t is rounded to its data
type before it is normalized, so that forward and backward see the same t.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megalite_kernels.backend import Backend, use_triton, wide_dtype
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, models
from megalite_kernels.rms_norm import launch_backward, launch_forward, rms_norm
from megalite_kernels.rms_norm import reference as rms_norm_reference


def reference(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return rms_norm_reference(total, weight, eps), total


@torch.library.custom_op("megalite::add_rms_norm", mutates_args=())
def _op(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    normal, total, inverse = launch_forward(x, y, weight, eps)
    assert total is not None
    return normal, total, inverse


@_op.register_fake
def _(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    inverse = x.new_empty(x.shape[:-1].numel(), dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), inverse


@torch.library.custom_op("megalite::add_rms_norm_backward", mutates_args=())
def _backward_op(
    total: Tensor, weight: Tensor, inverse: Tensor, dnormal: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    return launch_backward(total, weight, inverse, dnormal, dtotal)


@_backward_op.register_fake
def _(total: Tensor, weight: Tensor, inverse: Tensor, dnormal: Tensor, dtotal: Tensor | None) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, total, inverse = output
    ctx.save_for_backward(total, inputs[2], inverse)
    ctx.mark_non_differentiable(inverse)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dnormal: Tensor | None, dtotal: Tensor | None, _: None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if dnormal is None:
        return dtotal, dtotal, None, None
    total, weight, inverse = ctx.saved_tensors
    dx, dweight = _backward_op(total, weight, inverse, dnormal, dtotal)
    return dx, dx, dweight, None


_op.register_autograd(_gradients, setup_context=_save)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, backend: Backend | Literal["apex"] = "auto"
) -> tuple[Tensor, Tensor]:
    """RMSNorm(x + y) · weight over the last dimension, and x + y.

    x and y `[…, d]` have one shape and data type; weight `[d]` may have another data type. Strides are as for
    `rms_norm`. x + y and one number per row are saved for backward. backend: may be apex, whose norm then follows
    PyTorch's addition.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"add_rms_norm: x {list(x.shape)} {x.dtype} and y {list(y.shape)} {y.dtype} must be of one shape and type"
        )
    if backend != "apex" and use_triton(backend, x.device):
        normal, total, _ = _op(x, y, weight, eps)
        return normal, total
    total = x + y
    return rms_norm(total, weight, eps, backend), total


def bytes_moved(tokens: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward: x and y in, sum and norm out; by backward: both gradients and the sum in, dx out."""
    size = tokens * width * dtype.itemsize
    return 4 * size, 4 * size


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in models():
        x, weight = meta(TOKENS, shape.width, dtype=dtype), meta(shape.width, dtype=dtype)
        inverse = meta(TOKENS, dtype=torch.float32)
        yield CompileCase("add_rms_norm", model, dtype, partial(launch_forward, x, x, weight, 1e-5))
        yield CompileCase("add_rms_norm backward", model, dtype, partial(launch_backward, x, weight, inverse, x, x))
