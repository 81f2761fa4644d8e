"""Llama 2, 3 and 3.x, and SmolLM2, which is a Llama (arXiv 2307.09288, 2407.21783, 2502.02737)."""

from megalite.checkpoint.weights.maps.family import Family

DEFAULTS = {
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=DEFAULTS,
    features=lambda fields, model: {},
    fields=lambda model: {"attention_bias": False, "mlp_bias": False},
)
