"""The feed-forward part of a layer, as one rank computes it; the letters of shapes are those of `decoder`."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.schema import Kernels
from megalite.model.weights import column, row
from megalite.parallel.recompute import Cheap
from megalite.parallel.tensor import columns
from megalite.plan.parts.swiglu import SwiGLUPart
from megalite_kernels import swiglu


class MLP(nn.Module):
    """Feed-forward with a gate, SwiGLU or GEGLU, its width split over tp. factor: multiplies the output."""

    share_input = ("gate", "up")

    def __init__(self, part: SwiGLUPart, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        weights = dict(part.weights())
        self.group = tp.get_group()
        self.gate, self.up = column(weights, "gate", tp), column(weights, "up", tp)
        self.swiglu = Cheap(partial(swiglu, backend=kernels.swiglu, activation=part.kind.activation))
        self.down = row(weights, "down", tp, factor)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = columns(x, (self.gate, self.up), self.group)  # s b f/t
        return self.down(self.swiglu(gate, up))  # s/t b d
