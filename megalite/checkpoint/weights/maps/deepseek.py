"""DeepSeek-V2 and V3 with latent attention (arXiv 2405.04434, 2412.19437), without experts."""

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.weights.maps.family import LAYER, Family
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.latent import LATENT_ATTENTION, latent, latent_fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.config.schema import Model

TENSORS = {**LATENT_ATTENTION, **{name: ours for name, ours in LAYER.items() if not name.startswith("self_attn.")}}
LATENT_DEFAULTS = {
    **DEFAULTS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    _refuse_experts(fields, model)
    fields.refuse("rope_interleave", True, "means that features half of a head apart turn together")
    return latent(fields, model)


def _v2_features(fields: Fields, model: Model) -> Mapping[str, Any]:
    _refuse_experts(fields, model)
    if model.width % model.heads:
        raise fields.wrong("hidden_size", "must be a multiple of num_attention_heads in deepseek_v2 of transformers")
    return latent(fields, model)


def _refuse_experts(fields: Fields, model: Model) -> None:
    if fields.get("first_k_dense_replace", 0) < model.layers:
        rule = "means layers with shared experts, which megalite's layers lack; it must be num_hidden_layers"
        raise fields.wrong("first_k_dense_replace", rule)


def _fields(model: Model) -> Mapping[str, Any]:
    return {**latent_fields(model), "first_k_dense_replace": model.layers, "attention_bias": False}


def _v3_fields(model: Model) -> Mapping[str, Any]:
    return {**_fields(model), "rope_interleave": True, "num_nextn_predict_layers": 0}


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={**LATENT_DEFAULTS, "vocab_size": 102400, "first_k_dense_replace": 0},
    features=_v2_features,
    fields=_fields,
    layer=TENSORS,
    latent=True,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **LATENT_DEFAULTS,
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
    },
    features=_features,
    fields=_v3_fields,
    layer=TENSORS,
    latent=True,
)
