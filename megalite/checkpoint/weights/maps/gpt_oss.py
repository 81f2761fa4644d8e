"""gpt-oss: experts with biases and a clamped gate, attention sinks, windows in every second layer (arXiv 2508.10925).

Files have all experts of a layer in one tensor, the matrices transposed, the columns of gate and up in turns. Published
ones have them in blocks of 4 bits instead (`maps.woven`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.checkpoint.weights.maps.experts import experts, with_width
from megalite.checkpoint.weights.maps.family import LAYER, Family, alternating_types, window_fields, windows
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.config.model_schema import Model

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
WINDOW = 128
QUANTIZED = "mxfp4"  # the only form that can be read


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        fields.refuse(key, value, "is another gate of experts")
    how = fields.section("quantization_config")
    if how is not None and how.get("quant_method") != QUANTIZED:
        raise fields.wrong("quantization_config", f"is no {QUANTIZED}; turn the weights into bf16 first")
    biases = fields.flag("attention_bias")
    return {
        "qkv_bias": biases,
        "out_bias": biases,
        "attention": replace(windows(fields, model, alternating_types(fields, model, 2)), sinks=True),
        "experts": experts(fields, 128, gate="clamped", biases=True),
    }


def _fields(model: Model) -> Mapping[str, Any]:
    found = with_width(model)
    plain = {} if model.rope_scaling is not None else {"rope_scaling": {"rope_type": "default"}}  # else it is YaRN
    return {
        **plain,
        "intermediate_size": found.width,
        "num_local_experts": found.count,
        "num_experts_per_tok": found.active,
        "attention_bias": model.qkv_bias,
        **window_fields(model, WINDOW),
        "swiglu_limit": 7.0,
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": YARN,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "sliding_window": WINDOW,
    },
    features=_features,
    fields=_fields,
    layer={"self_attn.sinks": ("attention.sinks",), **LAYER, "self_attn.o_proj.bias": ("attention.o.bias",)},
    experts={
        "mlp.router.weight": ("mlp.router.weight",),
        "mlp.router.bias": ("mlp.router.bias",),
        "mlp.experts.gate_up_proj": ("mlp.experts.gate.weight", "mlp.experts.up.weight"),
        "mlp.experts.gate_up_proj_bias": ("mlp.experts.gate.bias", "mlp.experts.up.bias"),
        "mlp.experts.down_proj": ("mlp.experts.down.weight",),
        "mlp.experts.down_proj_bias": ("mlp.experts.down.bias",),
    },
    woven=True,
    reads=("attention_bias", "quantization_config"),
)
