"""The norms of the residual stream, and what all norms of a model share."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from megalite.config.model_schema import Model
from megalite.config.schema import Kernels
from megalite.parallel.parameter import parameter, whole
from megalite.parallel.recompute import Cheap
from megalite.plan.parts.part import Weight
from megalite_kernels import add_rms_norm, rms_norm
from megalite_kernels.backend import wide_dtype


@dataclass(frozen=True)
class NormKind:
    """Form of RMSNorm: what is added to the mean square, and whether 1 is added to the weights."""

    eps: float
    one_plus: bool = False

    @staticmethod
    def of(model: Model) -> "NormKind":
        return NormKind(model.norm_eps, model.norm_gain == "one_plus_weight")

    def gains(self, weight: Tensor) -> Tensor:
        """Factors of normalized features. Sums with 1 are not rounded to a weight's narrow data type."""
        return weight.to(wide_dtype(weight.dtype)) + 1 if self.one_plus else weight


class Norm(nn.Module):
    """RMSNorm, multiplied by `factor`: in the few weights, so that no pass over activations is added."""

    def __init__(self, weight: Weight, kind: NormKind, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        self.roles = {"weight": weight.role}
        self.weight = parameter(weight, tp, Replicate())
        self.kind, self.factor = kind, factor
        self.rms_norm = Cheap(partial(rms_norm, backend=kernels.rms_norm))
        self.add_rms_norm = partial(add_rms_norm, backend=kernels.rms_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self._gains(), self.kind.eps)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + y, and x + y. None is 0."""
        if y is None:
            return self(x), x
        gains = self._gains()
        normal, total = self.add_rms_norm(x, y, gains, self.kind.eps)
        return self.rms_norm.remember(normal, total, gains, self.kind.eps), total

    def _gains(self) -> Tensor:
        gains = self.kind.gains(whole(self.weight))
        return gains if self.factor == 1 else gains * self.factor
