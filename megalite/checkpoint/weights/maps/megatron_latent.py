"""Latent attention of Megatron-Core: its tensors as blocks of our weights, and its arguments. Imports no torch.

Rows are in the order of transformers' (`latent`). Tensor-parallel ranks share what is made of latents, head by head,
and have copies of what makes latents. Norms of latents belong to the matrices after them with Transformer Engine, and
are modules of their own without; that before attention is one in both.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.base.errors import InputError
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.latent import strips_of_latents
from megalite.checkpoint.weights.maps.megatron_experts import ALL, Share
from megalite.checkpoint.weights.maps.strips import Table, Theirs
from megalite.config.model_schema import Attention, Latent, Model, RopeScaling
from megalite.plan.parts.part import Weight

ATTENTION = "self_attention."
OF_LATENTS = {  # tensors of which ranks have some heads, and ours
    f"{ATTENTION}linear_q_proj.weight": ("q",),
    f"{ATTENTION}linear_q_up_proj.weight": ("q_up",),
    f"{ATTENTION}linear_kv_up_proj.weight": ("k_up", "v_up"),
}
MAKING_LATENTS = {  # tensors of which they have copies
    f"{ATTENTION}linear_q_down_proj.weight": ("q_down",),
    f"{ATTENTION}linear_kv_down_proj.weight": ("kv_down", "k_shared"),
}
Q_NORM, KV_NORM = f"{ATTENTION}q_layernorm.weight", f"{ATTENTION}kv_layernorm.weight"
FUSED_NORMS = {  # with Transformer Engine, and without
    f"{ATTENTION}linear_q_up_proj.layer_norm_weight": Q_NORM,
    f"{ATTENTION}linear_kv_up_proj.layer_norm_weight": KV_NORM,
}
STRIPS = 2  # strips that a head has in each tensor of OF_LATENTS
NORM_EPS = 1e-6  # as norms of latents have it; Megatron has one for all norms
DEFAULTS = {  # values that Megatron takes for arguments that are not there
    "rope_type": "yarn",
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


def of_latents(model: Model, own: str, ours: Mapping[str, Weight], share: Share = ALL) -> Table:
    """The matrices of a layer's latent attention but for the last; `own` begins the names of our weights."""
    table = {}
    for theirs, parts in {**OF_LATENTS, **MAKING_LATENTS}.items():
        found = {name: ours[name] for name in (f"{own}attention.{part}.weight" for part in parts) if name in ours}
        if not found:
            continue
        strips = tuple(strips_of_latents(model, found))
        if theirs in OF_LATENTS:
            first, end = share.of(model.heads)
            strips = strips[STRIPS * first : STRIPS * end]
        table[theirs] = Theirs((sum(strip.height for strip in strips), strips[0].width), strips)
    return table


def latent(fields: Fields, attention: Attention) -> dict[str, Any]:
    """The keys of a model that arguments tell beyond others' if they mean latent attention. Raises InputError."""
    if not fields.flag("multi_latent_attention"):
        return {}
    fields = Fields(fields.file, {**DEFAULTS, **fields.values})
    if not fields.flag("qk_layernorm"):
        raise fields.wrong("qk_layernorm", "must be true with multi_latent_attention, whose latents have norms here")
    epsilon = "norm_epsilon" if fields.get("norm_epsilon") is not None else "layernorm_epsilon"
    if fields.number(epsilon, 1e-5) != NORM_EPS:
        raise fields.wrong(epsilon, f"must be {NORM_EPS:g} with multi_latent_attention, as norms of latents have it")
    query_rank = None if fields.get("q_lora_rank") is None else fields.whole("q_lora_rank")
    turning = fields.whole("qk_pos_emb_head_dim")
    found = Latent(query_rank, fields.whole("kv_lora_rank"), fields.whole("v_head_dim"))
    return {
        "kv_heads": fields.whole("num_attention_heads"),
        "head_width": fields.whole("qk_head_dim") + turning,
        "rotary_width": turning,
        "rope_scaling": _scaling(fields),
        "qk_norm": False,
        "attention": replace(attention, latent=found),
    }


def _scaling(fields: Fields) -> RopeScaling | None:
    kind, factor = fields.get("rope_type"), fields.number("rotary_scaling_factor")
    if kind not in ("rope", "yarn"):
        raise fields.wrong("rope_type", "must be rope or yarn with multi_latent_attention")
    turns, scores = fields.number("mscale"), fields.number("mscale_all_dim")
    if kind == "rope" and scores and factor > 1:  # it sharpens scores all the same
        raise fields.wrong("mscale_all_dim", "must be 0 with rope_type rope")
    if kind == "rope" or factor == 1:
        return None
    if (scores == 0 and turns != 1) or turns <= 0 or scores < 0:
        rule = "must be above 0, and 1 where mscale_all_dim is 0; that must be at least 0"
        raise fields.wrong("mscale", rule)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=fields.whole("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast"),
        beta_slow=fields.number("beta_slow"),
        mscale=turns if scores else None,
        mscale_all_dim=scores or None,
    )


def latent_arguments(model: Model) -> dict[str, Any]:
    """The inverse of `latent`. Raises InputError for scaling that Megatron lacks in latent attention."""
    found, scaling = model.attention.latent, model.rope_scaling
    if found is None:
        return {"multi_latent_attention": False}
    if scaling is not None and scaling.kind != "yarn":
        rule = "Megatron's latent attention has yarn alone; use another kind of files"
        raise InputError(f"model.rope_scaling.kind = {scaling.kind}: {rule}")
    told = scaling or RopeScaling(factor=1.0, original_length=4096)
    return {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "qk_layernorm": True,
        "use_rope_scaling": False,
        "q_lora_rank": found.query_rank,
        "kv_lora_rank": found.key_rank,
        "qk_head_dim": model.head_size - model.rotary_size,
        "qk_pos_emb_head_dim": model.rotary_size,
        "v_head_dim": found.value_width,
        "rope_type": "rope" if scaling is None else "yarn",
        "rotary_scaling_factor": told.factor,
        "original_max_position_embeddings": told.original_length,
        "beta_fast": told.beta_fast,
        "beta_slow": told.beta_slow,
        "mscale": told.mscale or 1.0,
        "mscale_all_dim": told.mscale_all_dim or 0.0,
    }
