"""Adapters beside the matrices of a layer (LoRA, arXiv 2106.09685)."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.model.experts import ExpertLinear
from megalite.parallel.tensor import ColumnLinear, CopiedLinear, Linear, RowLinear
from megalite.plan.parts.adapted import factor_names
from megalite.plan.parts.part import Weight


def add_adapters(layer: nn.Module, weights: Mapping[str, Weight], scale: float, tp: DeviceMesh, ep: DeviceMesh) -> None:
    """Add to the linear layers of a `layer` of the model the factors that are among its `weights`, by name.

    A pair adds to what its layer returns in the same state: split over tp, or a part of the sequence.
    """
    for name, module in list(layer.named_modules()):
        names = factor_names(name)
        if not isinstance(module, Linear) or names[0] not in weights:
            continue
        first, second = (weights[each] for each in names)
        module.lora_scale = scale
        match module:
            case ExpertLinear():
                module.lora_a, module.lora_b = ExpertLinear(first, None, ep), ExpertLinear(second, None, ep)
            case RowLinear():
                module.lora_a, module.lora_b = RowLinear(first, tp), CopiedLinear(second, tp)
            case ColumnLinear():
                module.lora_a, module.lora_b = CopiedLinear(first, tp), ColumnLinear(second, tp)
            case _:
                module.lora_a, module.lora_b = CopiedLinear(first, tp), CopiedLinear(second, tp)
