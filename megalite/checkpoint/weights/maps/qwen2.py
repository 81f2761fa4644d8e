"""Qwen2 and Qwen2.5: biases of queries, keys and values (arXiv 2407.10671, 2412.15115)."""

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.weights.maps.family import Family, layer_types, listed_types, windows
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.config.model_schema import Attention, Model

DEFAULTS_OF_QWEN = {
    **DEFAULTS,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "sliding_window": 4096,
}


def attention(fields: Fields, model: Model) -> Attention:
    """The windows of the layers, which all Qwens tell in one way."""
    return windows(fields, model, listed_types(fields, model))


def window_fields(model: Model) -> Mapping[str, Any]:
    """The inverse of `attention`."""
    window = model.attention.window
    return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": layer_types(model)}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=DEFAULTS_OF_QWEN,
    features=lambda fields, model: {"attention": attention(fields, model), "qkv_bias": True},
    fields=window_fields,
)
