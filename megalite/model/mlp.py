"""The feed-forward part of a layer, as one rank computes it; the letters of shapes are those of `decoder`."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.layers import SwiGLU
from megalite.config.schema import Kernels
from megalite.parallel.recompute import Cheap
from megalite.parallel.tensor import ColumnLinear, RowLinear, columns
from megalite.plan import roles
from megalite_kernels import swiglu


class MLP(nn.Module):
    """SwiGLU feed-forward, its width split over tp. factor: of its output."""

    def __init__(self, width: int, kind: SwiGLU, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        self.group = tp.get_group()
        self.gate = ColumnLinear(width, kind.width, tp, roles.GATE)
        self.up = ColumnLinear(width, kind.width, tp, roles.UP)
        self.swiglu = Cheap(partial(swiglu, backend=kernels.swiglu))
        self.down = RowLinear(kind.width, width, tp, roles.DOWN, factor)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = columns(x, (self.gate, self.up), self.group)  # s b f/t
        return self.down(self.swiglu(gate, up))  # s/t b d
