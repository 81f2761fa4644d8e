"""Qwen3 with experts, in all layers or in some (arXiv 2505.09388)."""

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.weights.maps.experts import EXPERTS, experts, with_width
from megalite.checkpoint.weights.maps.family import Family, windows
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.llama import DEFAULTS
from megalite.checkpoint.weights.maps.models import first_and_every
from megalite.config.model_schema import Attention, Model


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    attention = Attention()
    if fields.flag("use_sliding_window"):
        fields.refuse("max_window_layers", 0, "means windows in some layers or in all, as versions of transformers go")
        attention = windows(fields, model, None)
    first_dense, every = _layers(fields, model.layers)
    found = experts(
        fields,
        128,
        width=fields.whole("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob"),
        first_dense=first_dense,
        every=every,
    )
    return {"qk_norm": True, "attention": attention, "experts": found}


def _layers(fields: Fields, layers: int) -> tuple[int, int]:
    """Return the number of layers at the beginning without experts, and n: every n-th of the others has some."""
    every, without = fields.whole("decoder_sparse_step"), fields.get("mlp_only_layers", [])
    if not isinstance(without, list) or not all(type(number) is int for number in without):
        raise fields.wrong("mlp_only_layers", "must be a list of numbers of layers")
    if every > layers:
        raise fields.wrong("decoder_sparse_step", f"leaves none of the {layers} layers any experts")
    found = first_and_every([number not in without and (number + 1) % every == 0 for number in range(layers)])
    if found is None:
        rule = "megalite has layers without experts at the beginning, and all but every n-th"
        raise fields.wrong("mlp_only_layers", rule)
    return found


def _fields(model: Model) -> Mapping[str, Any]:
    found, window = with_width(model), model.attention.window
    return {
        "moe_intermediate_size": found.width,
        "num_experts": found.count,
        "num_experts_per_tok": found.active,
        "norm_topk_prob": found.normalize,
        "decoder_sparse_step": found.every,
        "mlp_only_layers": list(range(found.first_dense)),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0,
        "attention_bias": False,
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    features=_features,
    fields=_fields,
    experts=EXPERTS,
)
