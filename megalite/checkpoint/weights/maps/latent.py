"""Latent attention as transformers has it: its keys in config.json, and the rows of its tensors. Imports no torch.

Features of a head that turn come last there, and first here; in both, those that pair up are neighbours.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.strips import Strip, part, whole
from megalite.config.model_schema import Latent, Model
from megalite.plan.parts.part import Weight

LATENT_ATTENTION = {  # tensors of a layer, and those of ours that they hold; one of the first two rows is there
    "self_attn.q_proj.weight": ("attention.q.weight",),
    "self_attn.q_b_proj.weight": ("attention.q_up.weight",),
    "self_attn.q_a_proj.weight": ("attention.q_down.weight",),
    "self_attn.q_a_layernorm.weight": ("attention.q_norm.weight",),
    "self_attn.kv_a_proj_with_mqa.weight": ("attention.kv_down.weight", "attention.k_shared.weight"),
    "self_attn.kv_a_layernorm.weight": ("attention.kv_norm.weight",),
    "self_attn.kv_b_proj.weight": ("attention.k_up.weight", "attention.v_up.weight"),
    "self_attn.o_proj.weight": ("attention.o.weight",),
}


def strips_of_latents(model: Model, parts: Mapping[str, Weight]) -> Iterator[Strip]:
    """Our weights in one of their tensors, in the order of its rows."""
    found = {name.split(".")[-2]: (name, weight) for name, weight in parts.items()}
    turning = model.rotary_size
    if "q" in found or "q_up" in found:
        ((name, weight),) = found.values()
        for head in range(0, weight.shape[0], model.head_size):
            yield part(name, weight, rows=(head + turning, head + model.head_size))
            yield part(name, weight, rows=(head, head + turning))
    elif "k_up" in found:
        heads = zip(*(_heads(model, *each) for each in found.values()), strict=True)
        yield from chain.from_iterable(heads)
    else:
        yield from (whole(*each) for each in found.values())


def _heads(model: Model, name: str, weight: Weight) -> Iterator[Strip]:
    """The rows of every head."""
    size = weight.shape[0] // model.heads
    for head in range(model.heads):
        yield part(name, weight, rows=(head * size, (head + 1) * size))


def latent(fields: Fields, model: Model) -> Mapping[str, Any]:
    """The keys of a model with latent attention beyond sizes."""
    if model.kv_heads != model.heads:
        raise fields.wrong("num_key_value_heads", "must be num_attention_heads in latent attention")
    turning = fields.whole("qk_rope_head_dim")
    query_rank = None if fields.get("q_lora_rank") is None else fields.whole("q_lora_rank")
    found = Latent(query_rank, fields.whole("kv_lora_rank"), fields.whole("v_head_dim"))
    return {
        "head_width": fields.whole("qk_nope_head_dim") + turning,
        "rotary_width": turning,
        "attention": replace(model.attention, latent=found),
    }


def latent_fields(model: Model) -> Mapping[str, Any]:
    """The inverse of `latent`."""
    found = model.attention.latent
    assert found is not None  # else no family with latent attention is asked
    return {
        "q_lora_rank": found.query_rank,
        "kv_lora_rank": found.key_rank,
        "v_head_dim": found.value_width,
        "qk_nope_head_dim": model.head_size - model.rotary_size,
        "qk_rope_head_dim": model.rotary_size,
        "head_dim": model.rotary_size,  # the width that positions are made for
    }
