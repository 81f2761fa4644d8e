"""OLMo 2: norms of what attention and feed-forward return, and of all queries and keys together (arXiv 2501.00656)."""

from megalite.checkpoint.weights.maps.family import LAYER, Family
from megalite.checkpoint.weights.maps.llama import DEFAULTS

RENAMED_TENSORS = {
    "input_layernorm.weight": "post_attention_layernorm.weight",
    "post_attention_layernorm.weight": "post_feedforward_layernorm.weight",
}
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={**DEFAULTS, "vocab_size": 50304, "rms_norm_eps": 1e-5},
    features=lambda fields, model: {"norm": "post", "qk_norm": True, "qk_norm_width": "all"},
    fields=lambda model: {"attention_bias": False, "pad_token_id": None},
    layer={RENAMED_TENSORS.get(name, name): ours for name, ours in LAYER.items()},
)
