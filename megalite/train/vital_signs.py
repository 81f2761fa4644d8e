"""The vital signs of an optimizer step: a small vector, summed over all ranks by the same all-reduce as the norm."""

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.dist.mesh import Mesh
from megalite.stop import STOP


@dataclass(frozen=True)
class Reading:
    """The vital signs as numbers, the same on every rank."""

    loss: float  # mean per token
    norm: float  # of all gradients
    asked: tuple[str, ...]  # signals by which some rank was asked to stop

    @property
    def finite(self) -> bool:
        return isfinite(self.loss) and isfinite(self.norm)


@dataclass(frozen=True)
class Signs:
    """The vital signs of one step: on the device, and on their way to the host."""

    values: Tensor  # float64: square of the norm, loss, and for each signal how many ranks were sent it
    names: list[str]  # parameters whose gradients this rank counts
    norms: Tensor  # L2 norms of its parts of them
    host: Tensor  # `values`, once they have
    arrived: torch.cuda.Event | None  # None: they have

    @property
    def norm(self) -> Tensor:
        """The L2 norm of all gradients."""
        return self.values[0].sqrt()

    @property
    def loss(self) -> Tensor:
        """The mean loss per token."""
        return self.values[1]

    @property
    def bad(self) -> Tensor:
        """1 if loss or norm is not finite, else 0. Fused optimizers take this as `found_inf`."""
        return 1 - self.values[:2].isfinite().all().float()

    def read(self) -> Reading:
        """The numbers. Waits until the device has finished the step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        square, loss, *asked = self.host.tolist()
        names = tuple(number.name for number, ranks in zip(STOP, asked, strict=True) if ranks)
        return Reading(loss, sqrt(square), names)

    def offending(self) -> list[str]:
        """Parameters whose gradients are not finite on this rank."""
        return [name for name, norm in zip(self.names, self.norms.tolist(), strict=True) if not isfinite(norm)]


@torch.no_grad()
def take_signs(mesh: Mesh, names: list[str], norms: Tensor, loss: Tensor | None, asked: Collection[int]) -> Signs:
    """Sum the vital signs over all ranks; nothing waits for the device.

    loss: this rank's part of the mean loss; None if another rank counts it. asked: signals that this rank has received.
    """
    values = torch.zeros(2 + len(STOP), dtype=torch.float64, device=mesh.device)
    values[0] += norms.square().sum()
    if loss is not None:
        values[1] += loss
    for position, number in enumerate(STOP, start=2):
        if number in asked:
            values[position].fill_(1)  # a kernel with a constant; a copy from the host would wait
    dist.all_reduce(values, group=mesh.world)
    host = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda).copy_(values, non_blocking=True)
    arrived = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None
    return Signs(values, names, norms, host, arrived)
