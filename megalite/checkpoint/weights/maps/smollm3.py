"""SmolLM3: every fourth layer has no rotary positions (Hugging Face HuggingFaceTB/SmolLM3-3B)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.checkpoint.weights.maps.qwen2 import attention, window_fields
from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Model


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    interval = fields.whole("no_rope_layer_interval")
    listed = fields.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(model.layers)])
    found = attention(fields, model)
    every = listed.index(0) + 1 if isinstance(listed, list) and 0 in listed else None
    tried = replace(found, nope_every=every)
    if _rotary(replace(model, attention=tried)) == listed:
        return {"attention": tried}
    rule = "megalite leaves out rotary positions in no layer, or in every n-th"
    raise fields.wrong("no_rope_layers", rule)


def _rotary(model: Model) -> list[int]:
    """By layer: 1 with rotary positions, 0 without, as in transformers' configuration."""
    return [int(kind.rope is not None) for kind in layer_kinds(model)[: model.layers]]


def _fields(model: Model) -> Mapping[str, Any]:
    interval = {"no_rope_layer_interval": model.attention.nope_every or model.layers + 1}
    biases = {"attention_bias": False, "mlp_bias": False, "pad_token_id": None}
    return {**window_fields(model), **interval, "no_rope_layers": _rotary(model), **biases}


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    features=_features,
    fields=_fields,
)
