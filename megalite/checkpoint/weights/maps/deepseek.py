"""DeepSeek-V2 and V3: latent attention, and experts in all layers but the first (arXiv 2405.04434, 2412.19437)."""

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.weights.maps.experts import CORRECTED_EXPERTS, corrected_experts, corrected_fields
from megalite.checkpoint.weights.maps.family import LAYER, Family
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.latent import LATENT_ATTENTION, latent, latent_fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.config.model_schema import Experts, Model

TENSORS = {**LATENT_ATTENTION, **{name: ours for name, ours in LAYER.items() if not name.startswith("self_attn.")}}
LATENT_DEFAULTS = {
    **DEFAULTS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}


def _v3_features(fields: Fields, model: Model) -> Mapping[str, Any]:
    fields.refuse("rope_interleave", True, "means that features half of a head apart turn together")
    return {**latent(fields, model), "experts": _experts(fields, model)}


def _v2_features(fields: Fields, model: Model) -> Mapping[str, Any]:
    if model.width % model.heads:
        raise fields.wrong("hidden_size", "must be a multiple of num_attention_heads in deepseek_v2 of transformers")
    fields.refuse("norm_topk_prob", False, "is not what transformers computes")
    groups = {"greedy": {"groups": 1, "active_groups": 1}, "group_limited_greedy": {}}
    if (method := fields.get("topk_method", "greedy")) not in groups:
        raise fields.wrong("topk_method", "must be greedy or group_limited_greedy")
    plain = {"scores": "softmax", "normalize": False, "correction_rate": None}
    return {**latent(fields, model), "experts": _experts(fields, model, **plain, **groups[method])}


def _experts(fields: Fields, model: Model, **more: Any) -> Experts | None:
    """The experts, if any layer has some."""
    dense = fields.get("first_k_dense_replace")
    return None if isinstance(dense, int) and dense >= model.layers else corrected_experts(fields, **more)


def _fields(model: Model) -> dict[str, Any]:
    found = {"first_k_dense_replace": model.layers} if model.experts is None else corrected_fields(model)
    return {**latent_fields(model), **found, "attention_bias": False}


def _v3_fields(model: Model) -> Mapping[str, Any]:
    return {**_fields(model), "rope_interleave": True}


def _v2_fields(model: Model) -> Mapping[str, Any]:
    limited = model.experts is not None and model.experts.groups > 1
    return {**_fields(model), "topk_method": "group_limited_greedy" if limited else "greedy"}


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={
        **LATENT_DEFAULTS,
        "vocab_size": 102400,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
    },
    features=_v2_features,
    fields=_v2_fields,
    experts=CORRECTED_EXPERTS,
    dense=True,
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
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    features=_v3_features,
    fields=_v3_fields,
    experts=CORRECTED_EXPERTS,
    dense=True,
    predicts_more=True,
    layer=TENSORS,
    latent=True,
)
