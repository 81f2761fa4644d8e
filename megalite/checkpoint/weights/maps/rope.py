"""Rotary positions as a config.json of transformers tells them, and what of heads their tensors hold.

Imports no torch.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megalite.base.errors import listing
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.strips import Strip, part
from megalite.config.model_schema import SCALING_KEYS, Model, RopeScaling
from megalite.plan.parts.part import Weight

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # kinds of layers
ORIGINAL_LENGTH, ROTARY_FACTOR = "original_max_position_embeddings", "partial_rotary_factor"
KEYS = {  # theirs of RoPE scaling, beside rope_type and factor, and ours
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    ORIGINAL_LENGTH: "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
NEUTRAL_VALUES = {"mscale": None, "mscale_all_dim": None}  # only so, but for yarn of latent attention


def rope(fields: Fields, latent: bool = False) -> tuple[float, RopeScaling | None, float]:
    """Base and scaling of rotary positions, and the share of a head that they turn. latent: of latent attention.

    Read are the keys of transformers 4 (`rope_theta`, `rope_scaling`) and of 5 (`rope_parameters`).
    """
    found = fields.section("rope_parameters") or fields.section("rope_scaling") or {}
    section = {key: value for key, value in found.items() if value is not None}
    for key, value in section.items():
        if isinstance(value, dict):
            raise fields.wrong(key, "gives some layers a RoPE of their own, which megalite lacks", value)
    around = {key: fields.get(key) for key in ("rope_theta", ROTARY_FACTOR) if fields.get(key) is not None}
    told = {ROTARY_FACTOR: 1.0, **around, **section}
    theta, share = (fields.number(key, within=told) for key in ("rope_theta", ROTARY_FACTOR))
    if not 0 < share <= 1:
        raise fields.wrong(ROTARY_FACTOR, "must be above 0 and at most 1", share)
    kind = section.get("rope_type", section.get("type", "default"))
    for key, value in NEUTRAL_VALUES.items():
        known = latent and kind == "yarn" and key in KEYS
        if not known and section.get(key, value) != value:
            raise fields.wrong(key, f"changes RoPE in a way that megalite lacks; it must be {value}", section[key])
    if kind == "default":
        return theta, None, share
    if kind == "su" or (kind == "yarn" and "short_factor" in section):
        kind = "longrope"  # as the first Phi-3 called it
    if not isinstance(kind, str) or kind not in SCALING_KEYS:
        rule = f"is a kind of RoPE scaling that megalite does not know; it knows {listing(list(SCALING_KEYS), 'and')}"
        raise fields.wrong("rope_type", rule, kind)
    return theta, _scaling(fields, kind, section), share


def of_full_layers(fields: Fields) -> Fields:
    """The fields as of a model whose layers all turn as those without a window do."""
    full, over = _of_type(fields, FULL_ATTENTION), fields.section("rope_scaling") or {}
    return Fields(fields.file, {**fields.values, "rope_parameters": {**full, **over}})


def window_rope(fields: Fields, model: Model, key: str) -> float | None:
    """The base of RoPE in layers with a window, where they turn otherwise than others do.

    key: of the base where `rope_parameters` does not tell it, as in files of transformers 4.
    """
    section = _of_type(fields, SLIDING_ATTENTION)
    if section.get("rope_type", "default") != "default" or section.get(ROTARY_FACTOR, 1) != 1:
        rule = f"of {SLIDING_ATTENTION} scales RoPE, which megalite's layers with windows lack"
        raise fields.wrong("rope_parameters", rule)
    found = fields.number("rope_theta", within={"rope_theta": fields.get(key), **section})
    return None if found == model.rope_theta and model.rope_scaling is None else found


def _of_type(fields: Fields, kind: str) -> Mapping[str, Any]:
    """The part of `rope_parameters` for layers of one kind."""
    found = (fields.section("rope_parameters") or {}).get(kind) or {}
    if not isinstance(found, dict):
        raise fields.wrong("rope_parameters", f"must have an object for {kind}")
    return found


def rope_fields_by_type(model: Model) -> dict[str, Any]:
    """The inverse of `rope` and `window_rope`. transformers 5 takes `rope_parameters`, version 4 the other keys."""
    found, own = rope_fields(model), model.attention.window_rope_theta
    full = {"rope_type": "default", "rope_theta": model.rope_theta, **(found["rope_scaling"] or {})}
    window = {"rope_type": "default", "rope_theta": model.rope_theta if own is None else own}
    return {**found, "rope_parameters": {FULL_ATTENTION: full, SLIDING_ATTENTION: window}}


def _scaling(fields: Fields, kind: str, section: Mapping[str, Any]) -> RopeScaling:
    length, outside = fields.whole("max_position_embeddings"), fields.get(ORIGINAL_LENGTH)
    # transformers takes the key outside of the section first, and no other length than the largest for kind dynamic.
    told = {ORIGINAL_LENGTH: length, **section}
    if kind == "dynamic" or outside is not None:
        told[ORIGINAL_LENGTH] = length if kind == "dynamic" else outside
    found: dict[str, Any] = {"kind": kind}
    for key, ours in KEYS.items():
        if ours in SCALING_KEYS[kind] and key in told:
            found[ours] = (fields.numbers if ours.endswith("factors") else fields.number)(key, within=told)
    if kind == "yarn":
        found["truncate"] = told.get("truncate", True)
        if type(found["truncate"]) is not bool:
            raise fields.wrong("truncate", "must be true or false", found["truncate"])
    if "original_length" in found:
        original = found["original_length"]
        if original < 1 or original % 1:
            raise fields.wrong(ORIGINAL_LENGTH, "must be a whole number of at least 1", original)
        found["original_length"] = int(original)
        if kind == "longrope":
            told.setdefault("factor", max(length / original, 1.0))  # less sharpens attention no further
    return RopeScaling(**found, factor=fields.number("factor", within=told))


def rope_fields(model: Model) -> dict[str, Any]:
    """The inverse of `rope`."""
    scaling, share = model.rope_scaling, {}
    if model.rotary_width is not None and model.attention.latent is None:
        share = {ROTARY_FACTOR: _share(model)}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling and _section(scaling), **share}


def _section(scaling: RopeScaling) -> dict[str, Any]:
    used = {key: getattr(scaling, ours) for key, ours in KEYS.items() if ours in SCALING_KEYS[scaling.kind]}
    if scaling.kind == "dynamic":
        del used[ORIGINAL_LENGTH]  # it is max_position_embeddings
    told = {key: value for key, value in used.items() if value is not None}
    if not scaling.truncate:
        told["truncate"] = False
    return {"rope_type": scaling.kind, "factor": scaling.factor, **told}


def _share(model: Model) -> float:
    """The share of a head from which transformers computes `rotary_width`, rounding down."""
    share = model.rotary_size / model.head_size
    return share if int(model.head_size * share) == model.rotary_size else math.nextafter(share, 1)


def rows_of_heads(name: str, weight: Weight, model: Model) -> Iterator[Strip]:
    """The rows of a projection of queries or keys in their order.

    The features of a head that turn come first there. Here those that pair up are half a head apart, whether they turn
    or not, and the pairs that turn come first.
    """
    half, turning = model.head_size // 2, model.rotary_size // 2
    for head in range(0, weight.shape[0], model.head_size):
        for first, end in ((0, turning), (half, half + turning), (turning, half), (half + turning, 2 * half)):
            yield part(name, weight, rows=(head + first, head + end))
