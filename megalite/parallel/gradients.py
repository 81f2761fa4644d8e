"""Finishes gradients after the last backward of a step. No other module does so."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.distributed.mesh import Mesh
from megalite.parallel.parameter import Parameter, parameters, trainable
from megalite.plan.model.roles import EMBEDDING
from megalite_kernels.grad_norm import grad_norm

Stages = Mapping[int, nn.Module]  # a rank's stages by their global number


@torch.no_grad()
def finish(stages: Stages, placement: Sequence[int], mesh: Mesh, tied: bool) -> None:
    """Make every gradient of `stages` complete.

    FSDP2 has summed them over data-parallel ranks. Two sums are left: over tensor-parallel ranks, of parameters that
    are not split over them, and over both copies of a tied embedding, in the first and the last stage.
    placement: the pipeline rank that owns each stage.
    """
    if mesh.layout.tp > 1:
        sum_together(
            [_local_grad(param) for _, param, role, _ in _trainable(stages) if not role.split], mesh.group("tp")
        )
    if not tied or len(placement) == 1:
        return
    ends = [stage for stage in (0, len(placement) - 1) if stage in stages]
    tables = (found.value for stage in ends for found in trainable(stages[stage]) if found.role == EMBEDDING)
    grads = [_local_grad(table) for table in tables]
    match grads:
        case [first, last]:
            first += last
            last.copy_(first)
        case [one]:
            _sum_of_ends(one, mesh, placement[len(placement) - 1 - ends[0]])


def sum_together(grads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each of `grads` over all ranks, in place, by one collective. A rank may have none, or empty ones."""
    flat = torch.cat([grad.flatten() for grad in grads]) if grads else torch.empty(0)
    if flat.numel():
        dist.all_reduce(flat, group=group)
        sums = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_([grad.flatten() for grad in grads], sums)


def _sum_of_ends(grad: Tensor, mesh: Mesh, peer: int) -> None:
    """Add the gradient of the embedding's other copy, on pipeline rank `peer`, to `grad`."""
    other = mesh.along("pp", peer)
    received = torch.empty_like(grad)
    group = mesh.group("pp")
    exchange = [dist.P2POp(dist.isend, grad, other, group), dist.P2POp(dist.irecv, received, other, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    grad += received


@torch.no_grad()
def counted_norms(stages: Stages, placement: Sequence[int], mesh: Mesh, tied: bool) -> tuple[list[str], Tensor]:
    """The names of parameters that this rank counts, and the L2 norms of its parts of their gradients, `[parameters]`.

    Among ranks that hold the same elements, only the one at position 0 counts them. So the squares of all ranks' norms
    add up to the square of the global norm, which is the same in every layout.
    """
    counted = {name: _local_grad(param) for name, param in _counted(stages, placement, tied)}
    if not counted:
        return [], torch.zeros(0, device=mesh.device)
    return list(counted), torch.stack(torch._foreach_norm(list(counted.values())))


@torch.no_grad()
def parameter_norm(stages: Stages, placement: Sequence[int], mesh: Mesh, tied: bool) -> Tensor:
    """The L2 norm of all trained parameters, the same in every layout. Collective."""
    (some, *_) = (found for stage in stages.values() for found in parameters(stage))
    nothing = some.value.to_local().new_zeros(1)  # a rank may count no parameter
    counted = [param.to_local() for _, param in _counted(stages, placement, tied)]
    return grad_norm([nothing, *counted], groups=[mesh.world], backend="torch")


def _trainable(stages: Stages) -> Iterator[Parameter]:
    for stage in stages.values():
        yield from trainable(stage)


def _counted(stages: Stages, placement: Sequence[int], tied: bool) -> Iterator[tuple[str, DTensor]]:
    """The names and values of the parameters that this rank counts."""
    copy = len(placement) - 1 if tied and len(placement) > 1 else None  # the stage with the second copy
    for number, stage in stages.items():
        for name, param, role, _ in trainable(stage):
            if _counts(param) and not (number == copy and role == EMBEDDING):
                yield name, param


def _local_grad(param: Tensor) -> Tensor:
    assert isinstance(param.grad, DTensor)
    return param.grad.to_local()


def _counts(param: DTensor) -> bool:
    where = zip(param.device_mesh.get_coordinate() or (), param.placements, strict=True)
    return all(position == 0 for position, placement in where if placement.is_replicate())
