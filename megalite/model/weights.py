"""Layers made of the weights that a part of a layer describes in `megalite.plan.parts`."""

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from megalite.parallel.tensor import ColumnLinear, RowLinear
from megalite.plan.parts.part import Weight


def column(weights: Mapping[str, Weight], name: str, tp: DeviceMesh) -> ColumnLinear:
    """The column-parallel layer of a weight, with the bias of its name if there is one."""
    return ColumnLinear(weights[f"{name}.weight"], tp, weights.get(f"{name}.bias"))


def row(weights: Mapping[str, Weight], name: str, tp: DeviceMesh, factor: float) -> RowLinear:
    """The row-parallel layer of a weight, with the bias of its name if there is one. factor: of its output."""
    return RowLinear(weights[f"{name}.weight"], tp, factor, weights.get(f"{name}.bias"))
