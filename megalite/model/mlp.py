"""The feed-forward part of a layer, as one rank computes it; the letters of shapes are those of `decoder`."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.schema import Kernels
from megalite.model.weights import column, row
from megalite.parallel.recompute import Cheap
from megalite.parallel.tensor import columns, columns_in_one
from megalite.plan.parts.swiglu import SwiGLUPart
from megalite_kernels import swiglu, swiglu_of_halves


class MLP(nn.Module):
    """Feed-forward with a gate, SwiGLU or GEGLU, its width split over tp. factor: multiplies the output."""

    share_input = ("gate", "up")

    def __init__(self, part: SwiGLUPart, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        weights = dict(part.weights())
        self.group = tp.get_group()
        self.gate, self.up = column(weights, "gate", tp), column(weights, "up", tp)
        self.swiglu = Cheap(partial(swiglu, backend=kernels.swiglu, activation=part.kind.activation))
        self.swiglu_of_halves = partial(swiglu_of_halves, backend=kernels.swiglu, activation=part.kind.activation)
        self.down = row(weights, "down", tp, factor)

    def forward(self, x: Tensor) -> Tensor:
        layers = self.gate, self.up
        both = columns_in_one(x, layers, self.group)
        made = self.swiglu(*columns(x, layers, self.group)) if both is None else self.swiglu_of_halves(both)  # s b f/t
        return self.down(made)  # s/t b d
