"""Rotary position embedding of queries and keys that one matrix product made together with values.

Gradients of the three are parts of one tensor here, too, which one matrix product can take. Values are copied, so that
nothing keeps the tensor of which they are a part; or all three stay there, queries and keys turned in place, and no
byte of values moves. The kernel is that of `rope`.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from megalite_kernels.backend import Backend, use_triton
from megalite_kernels.rope import Layout, TorchRope, angles_at, check, launch


def launch_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor,
    positions: Tensor | None, start: int, interleaved: bool,
) -> Tensor:  # fmt: skip
    """Gradients of q, k and v in one tensor `[s, b, …]`, one behind the other."""
    shapes = [grad.shape[2:] for grad in (dq, dk, dv)]
    grads = dq.new_empty(*dq.shape[:2], sum(shape.numel() for shape in shapes))
    of_q, of_k, of_v = _parts(grads, shapes)
    for grad, into in ((dq, of_q), (dk, of_k)):
        launch(grad, cos, sin, positions, start, interleaved, True, into)
    of_v.copy_(dv)
    return grads


def _parts(joint: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of the parts of `joint`, as heads `[s, b, h, e]` of `shapes` `(h, e)`."""
    parts = joint.split([prod(shape) for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


@torch.library.custom_op("megalite::rope_of_parts", mutates_args=())
def _op(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    positions: Tensor | None, start: int, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    turned, keys = (launch(x, cos, sin, positions, start, interleaved, False) for x in (q, k))
    return turned, keys, v.clone(memory_format=torch.contiguous_format)


@_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("megalite::rope_of_parts_backward", mutates_args=())
def _backward_op(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor,
    positions: Tensor | None, start: int, interleaved: bool,
) -> Tensor:  # fmt: skip
    return launch_backward(dq, dk, dv, cos, sin, positions, start, interleaved)


@_backward_op.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> Tensor:
    return dq.new_empty(*dq.shape[:2], sum(grad.shape[2:].numel() for grad in (dq, dk, dv)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _q, _k, _v, cos, sin, positions, *ctx.how = inputs
    ctx.save_for_backward(cos, sin, positions)


def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *_parts(_backward_op(*grads, *ctx.saved_tensors, *ctx.how), [grad.shape[2:] for grad in grads]), *[None] * 5


_op.register_autograd(_gradients, setup_context=_save)


@torch.library.custom_op("megalite::rope_of_parts_in_place", mutates_args=("q", "k"))
def _op_in_place(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, start: int, interleaved: bool
) -> None:
    for x in (q, k):
        launch(x, cos, sin, positions, start, interleaved, False, x)


@_op_in_place.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> None:
    return None


class _InPlace(torch.autograd.Function):
    """`_op` that turns queries and keys where they are, and returns values as they are.

    Autograd takes no changed views beside other outputs, so all are given other names. An operation that had kept
    queries or keys for backward raises an error there, as they have another version.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, *how: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        ctx.how = how
        _op_in_place(q, k, cos, sin, positions, *how)
        return q.detach(), k.detach(), v.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, *grads)


def rope_of_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | int = 0,
    layout: Layout = "half",
    backend: Backend = "auto",
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[s, b, h, e]` and k `[s, b, k, e]`, turned as by `rope`, and a copy of v `[s, b, k, …]`.

    With kernels, the gradients of the three are parts of one tensor `[s, b, …]`, one behind the other. in_place:
    kernels turn q and k where they are, if the features of each of their tokens lie next to each other, and v is
    returned as it is.
    """
    given = _checked(q, k, cos, sin, positions, layout)
    if not use_triton(backend, q.device):
        return *TorchRope.apply(*angles_at(cos, sin, positions, len(q)), layout, q, k), v.contiguous()
    how = cos, sin, *given
    if in_place and all(x.stride()[2:] == (x.shape[3], 1) for x in (q, k)):
        return _InPlace.apply(q, k, v, *how)
    return _op(q, k, v, *how)


class _OfJoint(torch.autograd.Function):
    """`_op` or `_op_in_place` of the parts of one tensor, whose gradient is made whole."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, shapes: Any, in_place: bool, cos: Tensor, sin: Tensor, positions: Tensor | None,
        *how: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(cos, sin, positions)
        ctx.how = how
        q, k, v = _parts(joint.detach(), shapes)
        if not in_place:
            return _op(q, k, v, cos, sin, positions, *how)
        _op_in_place(q, k, cos, sin, positions, *how)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward_op(*grads, *ctx.saved_tensors, *ctx.how), *[None] * 7


def rope_of_joint(
    joint: Tensor,
    shapes: Sequence[tuple[int, int]],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | int = 0,
    layout: Layout = "half",
    backend: Backend = "auto",
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """`rope_of_parts` of queries, keys and values that are given as one tensor `[s, b, …]`, as is their gradient.

    shapes: the heads of each of the three, and their width. In place, nothing may have kept `joint` for backward.
    """
    q, k, v = _parts(joint, shapes)
    if not use_triton(backend, joint.device):
        return rope_of_parts(q, k, v, cos, sin, positions, layout, backend)
    how = _checked(q, k, cos, sin, positions, layout)
    return _OfJoint.apply(joint, shapes, in_place, cos, sin, *how)


def _checked(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | int, layout: Layout
) -> tuple[Tensor | None, int, bool]:
    """The positions of tokens, or that of the first, and whether pairs are interleaved, as kernels take them."""
    for x in (q, k):
        check(x, cos, sin, positions, layout)
    by_token, start = (positions, 0) if isinstance(positions, Tensor) else (None, positions)
    return by_token, start, layout == "interleaved"


def bytes_moved(tokens: int, width: int, dtype: torch.dtype, values: int = 0) -> tuple[int, int]:
    """Bytes moved by forward and by backward: all in, all out.

    width: features of queries, keys and values together. values: those that stay where they are in forward.
    """
    size = tokens * dtype.itemsize
    return 2 * (width - values) * size, 2 * width * size
