"""Mixtral: a Mistral with experts in all layers (arXiv 2401.04088)."""

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.weights.maps.experts import experts, with_width
from megalite.checkpoint.weights.maps.family import Family, windows
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.config.model_schema import Model


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    return {"attention": windows(fields, model, None), "experts": experts(fields, 8)}


def _fields(model: Model) -> Mapping[str, Any]:
    found = with_width(model)
    return {
        "intermediate_size": found.width,
        "num_local_experts": found.count,
        "num_experts_per_tok": found.active,
        "sliding_window": model.attention.window,
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_experts_per_tok": 2,
    },
    features=_features,
    fields=_fields,
    experts={
        "block_sparse_moe.gate.weight": ("mlp.router.weight",),
        "block_sparse_moe.experts.{}.w1.weight": ("mlp.experts.gate.weight",),
        "block_sparse_moe.experts.{}.w2.weight": ("mlp.experts.down.weight",),
        "block_sparse_moe.experts.{}.w3.weight": ("mlp.experts.up.weight",),
    },
)
