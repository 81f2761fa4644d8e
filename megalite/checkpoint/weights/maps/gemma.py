"""Gemma, Gemma 2 and Gemma 3 (arXiv 2403.08295, 2408.00118, 2503.19786).

All have norms of 1 + weight, GEGLU, and an embedding that is multiplied by the root of its width. Since Gemma 2, norms
are before and after attention and feed-forward, and scores have a scale of their own. Gemma 2 caps scores and logits;
Gemma 3 has norms of queries and keys, and another base of RoPE in layers with windows.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.checkpoint.weights.maps.family import LAYER, Family, alternating_types, window_fields, windows
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.rope import rope_fields_by_type, window_rope
from megalite.config.model_schema import Attention, Model

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "silu": "silu"}
WINDOW = 4096
DEFAULTS = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
DEFAULTS_SINCE_2 = {
    **DEFAULTS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": WINDOW,
}
LAYER_SINCE_2 = {
    **LAYER,
    "post_attention_layernorm.weight": ("attention_output_norm.weight",),
    "pre_feedforward_layernorm.weight": ("mlp_norm.weight",),
    "post_feedforward_layernorm.weight": ("mlp_output_norm.weight",),
}


def _features(fields: Fields, model: Model, key: str = "hidden_act") -> Mapping[str, Any]:
    """Features of every Gemma. key: the one that names the activation."""
    if model.width % model.heads:
        raise fields.wrong("hidden_size", "must be a multiple of num_attention_heads in Gemma of transformers")
    activation = fields.get(key)
    if activation not in ACTIVATIONS:
        raise fields.wrong(key, f"is another activation than {' and '.join(ACTIVATIONS)}")
    if fields.get("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "lets tokens attend to later ones, which megalite lacks")
    return {
        "norm_gain": "one_plus_weight",
        "activation": ACTIVATIONS[activation],
        "embedding_multiplier": math.sqrt(model.width),
    }


def _fields(model: Model) -> Mapping[str, Any]:
    name = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
    return {"hidden_act": name, "hidden_activation": name, "attention_bias": False, "pad_token_id": None}


def _features_since_2(fields: Fields, model: Model, attention: Attention) -> Mapping[str, Any]:
    """Features of Gemma 2 and 3. attention: windows."""
    scalar = fields.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise fields.wrong("query_pre_attn_scalar", "must be above 0")
    return {
        **_features(fields, model, "hidden_activation"),
        "norm": "both",
        "logits_softcap": _cap(fields, "final_logit_softcapping"),
        "attention": replace(attention, scale=None if scalar == model.head_size else scalar**-0.5),
    }


def _cap(fields: Fields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.number(key)


def _fields_since_2(model: Model) -> Mapping[str, Any]:
    scale = model.attention.scale
    return {
        **_fields(model),
        **window_fields(model, WINDOW),
        "query_pre_attn_scalar": model.head_size if scale is None else round(scale**-2),
        "final_logit_softcapping": model.logits_softcap,
        "attn_logit_softcapping": model.attention.softcap,
    }


def _features_of_2(fields: Fields, model: Model) -> Mapping[str, Any]:
    attention = windows(fields, model, alternating_types(fields, model, 2))
    return _features_since_2(fields, model, replace(attention, softcap=_cap(fields, "attn_logit_softcapping")))


def _features_of_3(fields: Fields, model: Model) -> Mapping[str, Any]:
    fields.refuse("attn_logit_softcapping", None, "caps scores, which transformers does not in Gemma 3")
    attention = windows(fields, model, alternating_types(fields, model, fields.whole("sliding_window_pattern", 6)))
    if attention.window is not None:
        attention = replace(attention, window_rope_theta=window_rope(fields, model, "rope_local_base_freq"))
    return {**_features_since_2(fields, model, attention), "qk_norm": True}


def _fields_of_3(model: Model) -> Mapping[str, Any]:
    found = rope_fields_by_type(model)
    local = found["rope_parameters"]["sliding_attention"]["rope_theta"]
    return {**_fields_since_2(model), **found, "rope_local_base_freq": local, "attn_logit_softcapping": None}


READS = ("hidden_act", "attn_logit_softcapping", "final_logit_softcapping")
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    defaults=DEFAULTS,
    features=_features,
    fields=_fields,
    reads=READS,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={
        **DEFAULTS_SINCE_2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    features=_features_of_2,
    fields=_fields_since_2,
    layer=LAYER_SINCE_2,
    reads=READS,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **DEFAULTS_SINCE_2,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    features=_features_of_3,
    fields=_fields_of_3,
    layer=LAYER_SINCE_2,
    rope_by_type=True,
    reads=READS,
)
