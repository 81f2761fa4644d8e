"""A row-parallel layer whose results are summed and scattered beside its own matrix products.

It does so in pieces of the sequence, or in the operations of `symmetric`, which compute the same.

While the product of one piece of the sequence runs, the results of the one before are summed and scattered. Backward
gathers the gradient of a piece while that of the one before is multiplied. Rows of a product do not depend on each
other, so the results are those of the whole. With n pieces and t ranks, the whole `[s, …]` is `[t, n, s/(t·n), …]`, and
piece i of it `[:, i]`: a run of positions of every rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.distributed.collectives import start_gather, start_reduce_scatter
from megalite.parallel.linear import WeightGradients, accumulate, products_of_pieces
from megalite.parallel.parameter import in_use
from megalite.parallel.product import PLAIN_PRODUCT, Prepared
from megalite.parallel.symmetric import gathered_products, scattered_product


def scattered_linear(
    x: Tensor,
    weight: DTensor,
    group: dist.ProcessGroup,
    gradients: WeightGradients | None,
    factor: float,
    n: int | None,
) -> Tensor:
    """The rank's part `[s/t, b, out]` of the sum of all ranks' factor · x Wᵀ, in `n` pieces; by PyTorch's products.

    x `[s, b, in/t]`. weight, gradients: as for `linears`. n: None: by the operations of `symmetric`.
    """
    # Detached, because autograd would call the hook of a copy though it gets no gradient here.
    promised = _Promised.apply(x, group, gradients, factor, n, weight)
    return _Scattered.apply(promised, x.detach(), in_use(weight).detach(), group, factor, n)


class _Promised(torch.autograd.Function):
    """Keeps what backward needs, and computes all of backward.

    Its output is as large as the layer's, but takes no memory and means nothing. Full recompute ends with what is kept
    last, so it does not scatter again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        gradients: WeightGradients | None,
        factor: float,
        n: int | None,
        param: DTensor,
    ) -> Tensor:
        ctx.group, ctx.gradients, ctx.factor, ctx.n, ctx.param = group, gradients, factor, n, param
        weight = in_use(param)
        ctx.save_for_backward(weight, *([x] if param.requires_grad else []))
        return x.new_empty(()).expand(len(x) // group.size(), *x.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        backward = _fused if ctx.n is None else partial(_in_pieces, ctx.n)
        of_x, whole, ordered = backward(grad, weight, ctx.group, ctx.factor)
        if kept:
            inputs = partial(ordered, kept[0].detach())  # without its graph, as `linears` puts it off
            make = partial(accumulate, [(ctx.param, (whole,))], inputs, PLAIN_PRODUCT, ctx.factor)
            if ctx.gradients is None or not ctx.gradients.later(make):
                make()
        return of_x, None, None, None, None, None


Backward = tuple[Tensor, Tensor, Callable[[Tensor], Prepared]]
"""Gradient of the input, that of the output gathered, and a function that puts the input's positions in its order."""


def _in_pieces(n: int, grad: Tensor, weight: Tensor, group: dist.ProcessGroup, factor: float) -> Backward:
    ranks = group.size()
    whole = grad.new_empty(n, len(grad) // n * ranks, *grad.shape[1:])
    started = [start_gather(part, group, into) for part, into in zip(grad.chunk(n), whole, strict=True)]
    gathered = [lambda pending=pending: (pending.wait(),) for pending in started]
    (of_x,) = products_of_pieces(
        gathered, ranks, lambda grad: (PLAIN_PRODUCT.input_gradient(grad, (weight,), None, factor),)
    )
    by_piece = (ranks, n, -1)
    return of_x, whole.flatten(0, 1), lambda x: (x.unflatten(0, by_piece).transpose(0, 1).flatten(0, 2),)


def _fused(grad: Tensor, weight: Tensor, group: dist.ProcessGroup, factor: float) -> Backward:
    whole, (of_x,) = gathered_products(grad, [weight], group, whole=True)
    assert whole is not None
    return of_x if factor == 1 else of_x.mul_(factor), whole, lambda x: (x,)


class _Scattered(torch.autograd.Function):
    """The layer's output, of which `promised` has the gradient."""

    @staticmethod
    def forward(
        ctx: Any, promised: Tensor, x: Tensor, weight: Tensor, group: dist.ProcessGroup, factor: float, n: int | None
    ) -> Tensor:
        if n is None:
            y = scattered_product(x, weight.t(), group)
            return y if factor == 1 else y.mul_(factor)
        mine = x.new_empty(promised.shape)
        started = []
        for into, piece in zip(mine.chunk(n), x.unflatten(0, (group.size(), n, -1)).unbind(1), strict=True):
            y = PLAIN_PRODUCT.forward((piece.flatten(0, 1),), (weight,), factor)
            started.append(start_reduce_scatter(y, group, into))
        for pending in started:
            pending.wait()
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None
