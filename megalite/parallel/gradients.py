"""Finishes gradients after the last backward of a step. No other module does so."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.distributed.mesh import Mesh
from megalite.parallel.parameter import trainable
from megalite.plan.parts.roles import EMBEDDING
from megalite_kernels.grad_norm import grad_norm

Stages = Mapping[int, nn.Module]  # a rank's stages by their global number


class Gradients:
    """The trained parameters of a rank's stages, and what is done with their gradients after the last backward.

    Parameters are listed once, since walking all modules takes longer than a small layer does. The list stays valid:
    loading and the optimizer change parameters in place. placement: the pipeline rank that owns each stage. shared: the
    first and the last stage have copies of the embedding.
    """

    def __init__(self, stages: Stages, placement: Sequence[int], mesh: Mesh, shared: bool) -> None:
        self.trained = {number: list(trainable(stage)) for number, stage in stages.items()}
        self._mesh = mesh
        copy = len(placement) - 1 if shared and len(placement) > 1 else None  # the stage with the second copy
        counted = {
            found.name: found.value
            for number, every in self.trained.items()
            for found in every
            if counts(found.value) and not (number == copy and found.role == EMBEDDING)
        }
        self._names, self._counted = list(counted), list(counted.values())
        some = next(param for stage in stages.values() for param in stage.parameters())
        wide = torch.promote_types(some.dtype, torch.float32)  # as trained parameters are
        self._nothing = torch.zeros(1, dtype=wide, device=mesh.device)  # a rank may count no parameter
        every = chain(*self.trained.values())
        self._replicated = [found.value for found in every if mesh.layout.tp > 1 and found.role.copied]
        ends = [stage for stage in (0, copy) if stage in self.trained] if copy is not None else []
        self._tables = [found.value for stage in ends for found in self.trained[stage] if found.role == EMBEDDING]
        # Where this rank has one copy of the table, the rank with the other one.
        self._peer = mesh.along("pp", placement[len(placement) - 1 - ends[0]]) if ends else None

    @torch.no_grad()
    def finish(self) -> None:
        """Make every gradient complete.

        FSDP2 has summed them over data-parallel ranks. Two sums are left: over tensor-parallel ranks, of parameters
        that are not split over them, and over both copies of a shared embedding, in the first and the last stage.
        """
        if self._replicated:
            sum_together(_local_grads(self._replicated), self._mesh.group("tp"), self._mesh.device)
        match _local_grads(self._tables):
            case [first, last]:
                first += last
                last.copy_(first)
            case [one]:
                self._sum_of_ends(one)

    def _sum_of_ends(self, grad: Tensor) -> None:
        """Add the gradient of the embedding's other copy to `grad`."""
        received = torch.empty_like(grad, device=self._mesh.device)
        pairs = ((dist.isend, grad.to(self._mesh.device)), (dist.irecv, received))
        group = self._mesh.group("pp")
        exchange = [dist.P2POp(operation, tensor, self._peer, group) for operation, tensor in pairs]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        grad += received.to(grad.device)

    @torch.no_grad()
    def counted_norms(self) -> tuple[list[str], Tensor]:
        """The names of parameters that this rank counts, and the L2 norms of its parts of their gradients.

        Among ranks that hold the same elements, only the one at position 0 counts them. So the squares of all ranks'
        norms `[parameters]` add up to the square of the global norm, which is the same in every layout.
        """
        if not self._counted:
            return [], torch.zeros(0, device=self._mesh.device)
        return self._names, torch.stack(torch._foreach_norm(_local_grads(self._counted))).to(self._mesh.device)

    @torch.no_grad()
    def parameter_norm(self) -> Tensor:
        """The L2 norm of all trained parameters, the same in every layout. Collective."""
        counted = [param._local_tensor for param in self._counted]
        if counted and counted[0].device != self._nothing.device:  # parameters on the host have one norm together
            counted = [grad_norm(counted, backend="torch").reshape(1).to(self._nothing.device)]
        return grad_norm([self._nothing, *counted], groups=[self._mesh.world], backend="torch")


def sum_together(grads: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum each of `grads` over all ranks, in place, by one collective. A rank may have none, or empty ones.

    device: that of the collective, where gradients are copied to if they are on the host.
    """
    flat = torch.cat([grad.flatten() for grad in grads]) if grads else torch.empty(0)
    if flat.numel():
        flat = flat.to(device)
        dist.all_reduce(flat, group=group)
        sums = flat.to(grads[0].device).split([grad.numel() for grad in grads])
        torch._foreach_copy_([grad.flatten() for grad in grads], sums)


def _local_grads(params: Iterable[DTensor]) -> list[Tensor]:
    # Attributes, because the checks of `to_local` take as long as the norm of a small gradient.
    return [param.grad._local_tensor for param in params]  # type: ignore[union-attr]


def counts(param: DTensor) -> bool:
    """Return whether this is the one rank that counts its part of `param`, among those that hold the same."""
    where = zip(param.device_mesh.get_coordinate() or (), param.placements, strict=True)
    return all(position == 0 for position, placement in where if placement.is_replicate())
