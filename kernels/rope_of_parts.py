"""Rotary position embedding of queries and keys that one matrix product made together with values.

Gradients of the three are parts of one tensor here, too, which one matrix product can take. Values are copied, so that
nothing keeps the tensor of which they are a part; or all three stay there, queries and keys turned in place, and no
byte of values moves. The kernel is that of `rope`.
"""

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
    widths = [grad.shape[2:].numel() for grad in (dq, dk, dv)]
    grads = dq.new_empty(*dq.shape[:2], sum(widths))
    of_q, of_k, of_v = _heads(grads, (dq, dk, dv))
    for grad, into in ((dq, of_q), (dk, of_k)):
        launch(grad, cos, sin, positions, start, interleaved, True, into)
    of_v.copy_(dv)
    return grads


def _heads(grads: Tensor, like: tuple[Tensor, ...]) -> list[Tensor]:
    """Views of the parts of `grads`, as heads `[s, b, h, e]`."""
    widths = [each.shape[2:].numel() for each in like]
    return [part.unflatten(-1, each.shape[2:]) for part, each in zip(grads.split(widths, -1), like, strict=True)]


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
    return *_heads(_backward_op(*grads, *ctx.saved_tensors, *ctx.how), grads), *[None] * 5


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
    for x in (q, k):
        check(x, cos, sin, positions, layout)
    if not use_triton(backend, q.device):
        return *TorchRope.apply(*angles_at(cos, sin, positions, len(q)), layout, q, k), v.contiguous()
    by_token, start = (positions, 0) if isinstance(positions, Tensor) else (None, positions)
    how = cos, sin, by_token, start, layout == "interleaved"
    if in_place and all(x.stride()[2:] == (x.shape[3], 1) for x in (q, k)):
        return _InPlace.apply(q, k, v, *how)
    return _op(q, k, v, *how)


def bytes_moved(tokens: int, width: int, dtype: torch.dtype, values: int = 0) -> tuple[int, int]:
    """Bytes moved by forward and by backward: all in, all out.

    width: features of queries, keys and values together. values: those that stay where they are in forward.
    """
    size = tokens * dtype.itemsize
    return 2 * (width - values) * size, 2 * width * size
