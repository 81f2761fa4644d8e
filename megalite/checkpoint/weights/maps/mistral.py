"""Mistral 7B, with its sliding window or without (arXiv 2310.06825)."""

from megalite.checkpoint.weights.maps.family import Family, windows
from megalite.checkpoint.weights.maps.llama import DEFAULTS

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={**DEFAULTS, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    features=lambda fields, model: {"attention": windows(fields, model, None)},
    fields=lambda model: {"sliding_window": model.attention.window},
)
