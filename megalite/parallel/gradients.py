"""Finishing gradients after the last backward of a step: the one place, in one order."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.dist.mesh import Mesh

TIED = "embed.weight"  # held by the first and the last stage when embeddings are tied


@torch.no_grad()
def finish(stage: nn.Module, mesh: Mesh, tied: bool) -> None:
    """Make every gradient of `stage` complete, placed as its parameter.

    FSDP2 has done this for the parameters that it shards. What is left are tensor-parallel partial sums
    where nothing is sharded, and the two copies of a tied embedding at the ends of a pipeline.
    """
    for param in stage.parameters():
        assert isinstance(param, DTensor)
        if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)
    if tied and mesh.layout.pp > 1 and holds_tied(mesh):
        grad = dict(stage.named_parameters())[TIED].grad
        assert isinstance(grad, DTensor)
        _sum_of_ends(grad.to_local(), mesh)


def holds_tied(mesh: Mesh) -> bool:
    return mesh.coordinates["pp"] in (0, mesh.layout.pp - 1)


def _sum_of_ends(grad: Tensor, mesh: Mesh) -> None:
    """Add to `grad` its counterpart at the other end of the pipeline."""
    pp = mesh.layout.pp
    other = mesh.along("pp", pp - 1 - mesh.coordinates["pp"])
    received = torch.empty_like(grad)
    group = mesh.group("pp")
    exchange = [dist.P2POp(dist.isend, grad, other, group), dist.P2POp(dist.irecv, received, other, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    grad += received


@torch.no_grad()
def global_norm(stage: nn.Module, mesh: Mesh, tied: bool) -> Tensor:
    """L2 norm of all gradients of all stages, the same scalar on every rank and in every layout.

    Of ranks that hold the same elements, the one at position 0 counts them. One all-reduce.
    """
    duplicate = TIED if tied and mesh.layout.pp > 1 and mesh.coordinates["pp"] == mesh.layout.pp - 1 else None
    counted = [_local_grad(p) for name, p in stage.named_parameters() if name != duplicate and _counts(p)]
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if counted:
        squares += torch.stack(torch._foreach_norm(counted)).square().sum()
    dist.all_reduce(squares, group=mesh.world)
    return squares.sqrt()


@torch.no_grad()
def clip(stage: nn.Module, norm: Tensor, limit: float) -> None:
    """Scale the gradients down so that their global `norm` is at most `limit`; no host synchronization."""
    grads = [_local_grad(param) for param in stage.parameters()]
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype))


def _local_grad(param: nn.Parameter) -> Tensor:
    assert isinstance(param.grad, DTensor)
    return param.grad.to_local()


def _counts(param: nn.Parameter) -> bool:
    assert isinstance(param, DTensor)
    where = zip(param.device_mesh.get_coordinate() or (), param.placements, strict=True)
    return all(position == 0 for position, placement in where if placement.is_replicate())
