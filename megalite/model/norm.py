"""The norms of the residual stream."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from megalite.config.schema import Kernels
from megalite.parallel.parameter import parameter, whole
from megalite.parallel.recompute import Cheap
from megalite.plan.parts.part import Weight
from megalite_kernels import add_rms_norm, rms_norm


class Norm(nn.Module):
    """RMSNorm, multiplied by `factor`: in the few weights, so that no pass over activations is added."""

    def __init__(self, weight: Weight, eps: float, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        self.roles = {"weight": weight.role}
        self.weight = parameter(weight, tp, Replicate())
        self.eps, self.factor = eps, factor
        self.rms_norm = Cheap(partial(rms_norm, backend=kernels.rms_norm))
        self.add_rms_norm = partial(add_rms_norm, backend=kernels.rms_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self._gains(), self.eps)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + y, and x + y. None is 0."""
        if y is None:
            return self(x), x
        gains = self._gains()
        normal, total = self.add_rms_norm(x, y, gains, self.eps)
        return self.rms_norm.remember(normal, total, gains, self.eps), total

    def _gains(self) -> Tensor:
        weight = whole(self.weight)
        return weight if self.factor == 1 else weight * self.factor
