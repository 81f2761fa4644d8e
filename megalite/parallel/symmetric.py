"""Matrix products fused with collectives of tensor parallelism, through memory that the GPUs of a node share.

Every rank copies its part of an input to memory that its peers can read, and multiplies the part of one peer while it
copies that of the next; or it computes a peer's part of an output while that peer fetches the one before. Copies need
no multiprocessor of the GPU, as NCCL's kernels do. The operations are PyTorch's (`torch.ops.symm_mem`). On a CPU they
are the collective and the product one after the other, by what PyTorch has for shapes alone: nothing is faster there,
and layouts can be compared with one process.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

ON_CPU = {
    "fused_all_gather_matmul": "_fused_all_gather_matmul_fallback",
    "fused_matmul_reduce_scatter": "_fused_matmul_reduce_scatter_fallback",
}


@cache
def prepare() -> None:
    """Make the operations known to PyTorch, and to its CPU."""
    symmetric_memory = import_module("torch.distributed._symmetric_memory")
    for name, fallback in ON_CPU.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CPU"):
            torch.library.impl(f"symm_mem::{name}", "cpu", getattr(symmetric_memory, fallback))


def gathered_products(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, whole: bool = False
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Return products of the inputs `[s/t, …, in]` of all ranks, put together, and weights `[in, out]` of this rank.

    whole: return these inputs first; None is there without.
    """
    operation = torch.ops.symm_mem.fused_all_gather_matmul
    gathered, products = operation(x.contiguous(), list(weights), 0, group.group_name, return_A=whole)
    return gathered, products


def scattered_product(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rank's part `[s/t, …, out]` of the sum of all ranks' products: x `[s, …, in]`, weight `[in, out]`."""
    product: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, group.group_name)
    return product
