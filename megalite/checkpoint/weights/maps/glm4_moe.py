"""GLM-4.5: experts as DeepSeek-V3 has them, and heads of which half turns (arXiv 2508.06471)."""

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.weights.maps.experts import CORRECTED_EXPERTS, corrected_experts, corrected_fields
from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.checkpoint.weights.maps.rope import ROTARY_FACTOR
from megalite.config.model_schema import Model


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    return {
        "qk_norm": fields.flag("use_qk_norm"),
        "qkv_bias": fields.flag("attention_bias"),
        "experts": corrected_experts(fields),
    }


def _fields(model: Model) -> Mapping[str, Any]:
    return {
        **corrected_fields(model),
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_norm,
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        **DEFAULTS,
        ROTARY_FACTOR: 0.5,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
    },
    features=_features,
    fields=_fields,
    experts=CORRECTED_EXPERTS,
    partial=True,
    predicts_more=True,
    reads=("attention_bias",),
)
