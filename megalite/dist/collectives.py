"""Collectives with gradients, along the leading dimension.

Each forward and its backward are conjugate: what one gathers, the other reduces (Korthikanti et al. 2022,
arXiv 2205.05198, §4.2.2). Activations are sequence-first, `[s, b, d]`, so that splitting the sequence
splits the leading dimension and a collective is one contiguous copy.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite_kernels.collectives import all_gather_single, reduce_scatter_single


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather_single(whole, x.contiguous(), group=group)
    return whole


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter_single(part, x.contiguous(), group=group)
    return part


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n/t, …]` on every rank → the concatenation `[n, …]`; backward sums and scatters."""
    return x if group.size() == 1 else _AllGather.apply(x, group)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums `[n, …]` on every rank → this rank's part `[n/t, …]` of their sum; backward gathers."""
    return x if group.size() == 1 else _ReduceScatter.apply(x, group)
