"""Phi-3: projections of queries, keys and values in one tensor, and gate and up in another (arXiv 2404.14219)."""

from megalite.checkpoint.maps.family import LAYER, Family, windows
from megalite.checkpoint.maps.llama import DEFAULTS

FUSED = {
    "self_attn.o_proj.weight": LAYER["self_attn.o_proj.weight"],
    "self_attn.qkv_proj.weight": ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
    "mlp.gate_up_proj.weight": ("mlp.gate.weight", "mlp.up.weight"),
    "mlp.down_proj.weight": LAYER["mlp.down_proj.weight"],
    "input_layernorm.weight": LAYER["input_layernorm.weight"],
    "post_attention_layernorm.weight": LAYER["post_attention_layernorm.weight"],
}
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={**DEFAULTS, "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    features=lambda fields, model: {"attention": windows(fields, model, None)},
    fields=lambda model: {"sliding_window": model.attention.window, "pad_token_id": None},
    layer=FUSED,
)
