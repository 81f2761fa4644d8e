"""Adapters beside the matrices of a layer (LoRA, arXiv 2106.09685)."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from megalite.config.layers import Adapter
from megalite.model.experts import ExpertLinear
from megalite.parallel.dropout import Dropout
from megalite.parallel.parameter import parameter
from megalite.parallel.tensor import ColumnLinear, CopiedLinear, Linear, RowLinear, VocabularyEmbedding
from megalite.plan.parts.adapted import factor_names, magnitude_name
from megalite.plan.parts.part import Weight


def add_adapters(
    layer: nn.Module, weights: Mapping[str, Weight], adapter: Adapter, tp: DeviceMesh, ep: DeviceMesh
) -> None:
    """Add to the linear layers of a `layer` of the model the factors that are among its `weights`, by name.

    A pair adds to what its layer returns in the same state: split over tp, or a part of the sequence.
    """
    linear = [(name, module) for name, module in layer.named_modules() if isinstance(module, Linear)]
    for name, module in linear:
        module.beside_adapters = True
        names = factor_names(name)
        if names[0] not in weights:
            continue
        first, second = (weights[each] for each in names)
        module.lora_scale = adapter.scale
        if adapter.dropout:
            split = isinstance(module, RowLinear)
            module.lora_dropout = Dropout(adapter.dropout, first.shape[-1], tp.get_local_rank(), split)
        match module:
            case ExpertLinear():
                module.lora_a, module.lora_b = ExpertLinear(first, None, ep), ExpertLinear(second, None, ep)
            case RowLinear():
                module.lora_a, module.lora_b = RowLinear(first, tp), CopiedLinear(second, tp)
            case ColumnLinear():
                module.lora_a, module.lora_b = CopiedLinear(first, tp), ColumnLinear(second, tp)
            case _:
                module.lora_a, module.lora_b = CopiedLinear(first, tp), CopiedLinear(second, tp)
        if adapter.dora:
            added = weights[magnitude_name(name)]
            module.lora_m = parameter(added, tp, Shard(0) if added.role.split else Replicate())
            module.roles["lora_m"] = added.role


def adapt_embedding(
    embedding: VocabularyEmbedding, weights: Mapping[str, Weight], adapter: Adapter, tp: DeviceMesh
) -> None:
    """Add to the `embedding` of the model the factors that are among its `weights`, by global name."""
    first, second = factor_names("embed.weight")
    if first in weights:
        embedding.lora_a, embedding.lora_b = CopiedLinear(weights[first], tp), VocabularyEmbedding(weights[second], tp)
        embedding.lora_scale = adapter.scale


def seed_dropout(stage: nn.Module, seed: int) -> None:
    """Let the choices of dropout in each layer of `stage` hang on the seed and the layer's name in the model."""
    for name, module in stage.named_modules():
        if isinstance(module, Linear) and module.lora_dropout is not None:
            module.lora_dropout.name = f"{seed}/{name}/dropout"
