"""Matrix products with the backward that tensor parallelism and split schedules want.

Layers that share an input are one function. Of an input that tensor parallelism gathers along the sequence only
the rank's own part is kept, and gathered again in backward beside the first matrix products (Korthikanti et al.
2022, arXiv 2205.05198, §4.2.2). Where a schedule splits backward, gradients of weights wait until they are asked
for (Qi et al., arXiv 2401.10241).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.dist.collectives import all_gather, start_gather, start_reduce_scatter
from megalite.parallel.parameter import add_gradient, part


class WeightGradients:
    """The gradients of weights that the layers of one stage have put off."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] | None = None

    @contextmanager
    def put_off(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, a backward pass makes no gradients of weights: it leaves what makes them in the list."""
        waiting: list[Callable[[], None]] = []
        self._waiting = waiting
        try:
            yield waiting
        finally:
            self._waiting = None

    def later(self, make: Callable[[], None]) -> bool:
        """Take `make` if gradients are being put off; whether it was taken."""
        if self._waiting is None:
            return False
        self._waiting.append(make)
        return True


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    gradients: WeightGradients | None = None,
) -> Sequence[Tensor]:
    """x Wᵀ for every weight, x gathered along the sequence over `group` first, if there is one.

    x `[s/t, b, in]`, or `[…, in]` without a group; weights: sharded parameters, `[out, in]` here. gradients: of
    weights, where a split backward leaves them; None: they are always made with the rest.
    """
    if torch.compiler.is_compiling():  # it cannot trace collectives that overlap, nor what is put off
        whole = x if group is None else all_gather(x, group)
        return [F.linear(whole, part(weight)) for weight in weights]
    return _Linears.apply(x, group, gradients, weights, *(part(weight) for weight in weights))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup | None,
        gradients: WeightGradients | None,
        params: Sequence[DTensor],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.gradients, ctx.params = group, gradients, params
        ctx.save_for_backward(x, *weights)
        whole = x if group is None else start_gather(x, group).wait()
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        group = ctx.group
        put_off = ctx.gradients is not None and ctx.gradients.later(partial(_accumulate, ctx.params, x, group, grads))
        inputs = None if put_off or group is None else start_gather(x, group)
        of_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            of_x.flatten(0, -2).addmm_(grad.flatten(0, -2), weight)
        scattered = None if group is None else start_reduce_scatter(of_x, group)
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if not put_off:
            whole = x if inputs is None else inputs.wait()
            of_weights = [_of_weight(grad, whole) for grad in grads]
        return (of_x if scattered is None else scattered.wait(), None, None, None, *of_weights)


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _accumulate(params: Sequence[DTensor], x: Tensor, group: dist.ProcessGroup | None, grads: Sequence[Tensor]) -> None:
    """The second half of a backward pass."""
    whole = x if group is None else start_gather(x, group).wait()
    for param, grad in zip(params, grads, strict=True):
        add_gradient(param, _of_weight(grad, whole))
