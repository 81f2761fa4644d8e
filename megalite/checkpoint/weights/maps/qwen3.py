"""Qwen3, dense: norms of queries and keys, and heads of a width of their own (arXiv 2505.09388)."""

from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.qwen2 import DEFAULTS_OF_QWEN, attention, window_fields

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**DEFAULTS_OF_QWEN, "head_dim": 128},
    features=lambda fields, model: {"attention": attention(fields, model), "qk_norm": True},
    fields=lambda model: {**window_fields(model), "attention_bias": False},
)
