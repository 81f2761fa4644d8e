"""Tensor-parallel layers (Megatron-LM, arXiv 1909.08053) whose collectives stand in the model's source.

A parameter is a DTensor on the `tp` mesh, so its global shape and placement are known to FSDP2, clipping
and checkpoints. `forward` computes on the rank's own part, a plain tensor.

    t  tensor-parallel size
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from megalite.dist.collectives import reduce_scatter


def parameter(shape: tuple[int, ...], mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """An unfilled parameter of global `shape`, this rank's part of it on the meta device."""
    part = list(shape)
    if isinstance(placement, Shard):
        part[placement.dim] //= mesh.size()
    local = torch.empty(part, device="meta")
    return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))


def whole(param: Tensor) -> Tensor:
    """A replicated parameter as a plain tensor, for use on this rank's part of the sequence or heads.

    Every rank then has a gradient of its own; declared partial, they are summed when gradients are finished.
    """
    assert isinstance(param, DTensor)
    return _local(param, Partial() if param.device_mesh.size() > 1 else param.placements[0])


def part(param: Tensor | None) -> Tensor:
    """This rank's part of a sharded parameter as a plain tensor."""
    assert isinstance(param, DTensor)
    return _local(param, param.placements[0])


def _local(param: DTensor, placement: Placement) -> Tensor:
    """The local tensor of `param`, whose gradient is a DTensor of `placement`."""
    if torch.compiler.is_compiling():  # it cannot trace _Local, and pays for the checks of to_local only once
        return param.to_local(grad_placements=[placement])
    return _Local.apply(param, placement)


class _Local(torch.autograd.Function):
    """`DTensor.to_local` without its checks in backward, which on the host cost more than a small matrix product."""

    @staticmethod
    def forward(ctx: Any, param: DTensor, placement: Placement) -> Tensor:
        spec = param._spec
        same = placement == spec.placements[0]
        ctx.spec = spec if same else DTensorSpec(spec.mesh, (placement,), tensor_meta=spec.tensor_meta)
        local = param.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False), None


class ColumnLinear(nn.Module):
    """y = x Wᵀ + b, the output features split over tp: `[…, in]` → `[…, out/t]`."""

    def __init__(self, width_in: int, width_out: int, mesh: DeviceMesh, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter((width_out, width_in), mesh, Shard(0))
        self.bias = parameter((width_out,), mesh, Shard(0)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, part(self.weight), None if self.bias is None else part(self.bias))


class RowLinear(nn.Module):
    """y = x Wᵀ, the input features split over tp: `[…, in/t]` → this rank's partial sum `[…, out]`."""

    def __init__(self, width_in: int, width_out: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = parameter((width_out, width_in), mesh, Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, part(self.weight))


class VocabularyEmbedding(nn.Module):
    """Rows of a table split by vocabulary over tp: tokens `[s, b]` → `[s/t, b, d]`."""

    def __init__(self, vocabulary: int, width: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = parameter((vocabulary, width), mesh, Shard(0))
        self.group: dist.ProcessGroup = mesh.get_group()

    def forward(self, tokens: Tensor) -> Tensor:
        table = part(self.weight)
        if self.group.size() == 1:
            return F.embedding(tokens, table)
        local = tokens - self.group.rank() * len(table)
        absent = (local < 0) | (local >= len(table))
        found = F.embedding(local.masked_fill(absent, 0), table).masked_fill(absent[..., None], 0)  # s b d
        return reduce_scatter(found, self.group)
