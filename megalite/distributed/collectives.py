"""Collectives with gradients, along the leading dimension.

Each forward and its backward are conjugate: what one gathers, the other reduces (Korthikanti et al. 2022,
arXiv 2205.05198, §4.2.2). Activations are sequence-first, `[s, b, d]`, so that splitting the sequence
splits the leading dimension and a collective is one contiguous copy.

The compiler can trace no collective that is under way. In its graphs the same ones are functional: each has a result of
its own, and waiting is an operation on it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite_kernels.collectives import all_gather_single, reduce_scatter_single

FUNCTIONAL = torch.ops._c10d_functional


@dataclass(frozen=True)
class Pending:
    """The result of a collective that is under way.

    work: None in a graph of the compiler, and where a rank is alone.
    """

    result: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The result; on CUDA the stream waits, not the host."""
        if torch.compiler.is_compiling():
            return FUNCTIONAL.wait_tensor(self.result)
        if self.work is not None:
            self.work.wait()
        return self.result


def start_gather(x: Tensor, group: dist.ProcessGroup, into: Tensor | None = None) -> Pending:
    """Begin to gather `[n/t, …]` of every rank into `[n, …]`, or a tensor of yours, without gradients."""
    if group.size() == 1:
        return Pending(x, None)
    if torch.compiler.is_compiling():
        return Pending(FUNCTIONAL.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name), None)
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:]) if into is None else into
    return Pending(whole, all_gather_single(whole, x.contiguous(), group=group, async_op=True))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup, into: Tensor | None = None) -> Pending:
    """Begin to sum `[n, …]` over all ranks and to give each its part `[n/t, …]` of the sum, without gradients.

    into: a contiguous tensor of yours that takes the part.
    """
    if group.size() == 1:
        return Pending(x, None)
    if torch.compiler.is_compiling():
        return Pending(FUNCTIONAL.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name), None)
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:]) if into is None else into
    return Pending(part, reduce_scatter_single(part, x.contiguous(), group=group, async_op=True))


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to sum `x` over all ranks, without gradients. `x` itself may take the sum."""
    if group.size() == 1:
        return Pending(x, None)
    if torch.compiler.is_compiling():
        return Pending(FUNCTIONAL.all_reduce(x, "sum", group.group_name), None)
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return start_gather(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_reduce_scatter(grad, ctx.group).wait(), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return start_reduce_scatter(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_gather(grad, ctx.group).wait(), None


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n/t, …]` on every rank → the concatenation `[n, …]`; backward sums and scatters."""
    return x if group.size() == 1 else _AllGather.apply(x, group)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums `[n, …]` on every rank → this rank's part `[n/t, …]` of their sum; backward gathers."""
    return x if group.size() == 1 else _ReduceScatter.apply(x, group)
