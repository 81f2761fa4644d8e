"""Phi-3, 3.5 and 4-mini: queries, keys and values in one tensor, and gate and up in another (arXiv 2404.14219)."""

from typing import Any

from megalite.checkpoint.weights.maps.family import LAYER, Family, windows
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.checkpoint.weights.maps.rope import ORIGINAL_LENGTH, rope_fields
from megalite.config.model_schema import Model

FUSED_TENSORS = {
    "self_attn.o_proj.weight": LAYER["self_attn.o_proj.weight"],
    "self_attn.qkv_proj.weight": ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
    "mlp.gate_up_proj.weight": ("mlp.gate.weight", "mlp.up.weight"),
    "mlp.down_proj.weight": LAYER["mlp.down_proj.weight"],
    "input_layernorm.weight": LAYER["input_layernorm.weight"],
    "post_attention_layernorm.weight": LAYER["post_attention_layernorm.weight"],
}


def _fields(model: Model) -> dict[str, Any]:
    found = {"sliding_window": model.attention.window, "pad_token_id": None}
    scaling, section = model.rope_scaling, rope_fields(model)["rope_scaling"]
    if scaling is None or scaling.kind != "longrope":
        return found
    # transformers 4 takes these three keys and no other, and the factor from the lengths outside.
    section = {"type": section.pop("rope_type"), **section}
    original = section.pop(ORIGINAL_LENGTH)
    if section["factor"] == max(model.sequence_length / original, 1.0):
        del section["factor"]
    return {**found, "rope_scaling": section, ORIGINAL_LENGTH: original}


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        ORIGINAL_LENGTH: 4096,
        "rms_norm_eps": 1e-5,
    },
    features=lambda fields, model: {"attention": windows(fields, model, None)},
    fields=_fields,
    layer=FUSED_TENSORS,
    scalings=("longrope",),
    partial=True,
)
