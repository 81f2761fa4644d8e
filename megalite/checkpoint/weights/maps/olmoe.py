"""OLMoE: experts in all layers, and norms of all queries and keys together (arXiv 2409.02060)."""

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.weights.maps.experts import EXPERTS, experts, with_width
from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.config.model_schema import Model


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    fields.refuse("clip_qkv", None, "clips queries, keys and values")
    if model.head_width is not None:
        raise fields.wrong(
            "head_dim", "must be hidden_size / num_attention_heads, which transformers' norms are made for"
        )
    found = experts(fields, 64, normalize=fields.flag("norm_topk_prob"))
    return {"qk_norm": True, "qk_norm_width": "all", "experts": found}


def _fields(model: Model) -> Mapping[str, Any]:
    found = with_width(model)
    return {
        "intermediate_size": found.width,
        "num_experts": found.count,
        "num_experts_per_tok": found.active,
        "norm_topk_prob": found.normalize,
        "attention_bias": False,
        "clip_qkv": None,
        "pad_token_id": None,
    }


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
    },
    features=_features,
    fields=_fields,
    experts=EXPERTS,
)
