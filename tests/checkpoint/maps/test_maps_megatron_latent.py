"""Latent attention in Megatron's arguments: what they mean, what they cannot say, and what megalite lacks."""

import re
from dataclasses import replace
from typing import Any

import pytest
from megatron_files import MODELS, arguments

from megalite.base.errors import InputError
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.checkpoint.weights.maps.megatron_arguments import arguments_of, model_of
from megalite.config.model_schema import Model, RopeScaling

LATENT = MODELS["latent attention"]
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4, "original_max_position_embeddings": 16}
SCALED = RopeScaling("yarn", 4.0, original_length=16)
MEANT: dict[str, tuple[dict[str, Any], RopeScaling | None]] = {
    "plain": ({}, None),
    "defaults": ({"rope_type": None}, RopeScaling("yarn", 40.0, original_length=4096)),
    "yarn": (YARN, SCALED),
    "other bounds": (YARN | {"beta_fast": 16, "beta_slow": 2}, replace(SCALED, beta_fast=16.0, beta_slow=2.0)),
    "both scales": (YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, replace(SCALED, mscale=0.7, mscale_all_dim=1.0)),
    "of nothing": (YARN | {"rotary_scaling_factor": 1.0, "mscale_all_dim": 1.0}, None),
    "of another attention": ({"use_rope_scaling": True}, None),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no norms": ({"qk_layernorm": False}, "qk_layernorm = False: must be true with multi_latent_attention"),
    "another epsilon": ({"norm_epsilon": 1e-5}, "norm_epsilon = 1e-05: must be 1e-06 with multi_latent_attention"),
    "no rank": ({"kv_lora_rank": None}, "kv_lora_rank = None: must be a whole number"),
    "a rank of nothing": ({"q_lora_rank": 0}, "q_lora_rank = 0: must be a whole number of at least 1"),
    "an odd part": ({"qk_pos_emb_head_dim": 3}, "model.rotary_width = 3"),
    "wide values": ({"v_head_dim": 11}, "model.attention.latent.value_width = 11: must be at most the width of a head"),
    "other positions": ({"rope_type": "mrope"}, "rope_type = 'mrope': must be rope or yarn"),
    "sharp scores": ({"rotary_scaling_factor": 40, "mscale_all_dim": 1.0}, "mscale_all_dim = 1.0: must be 0 with rope"),
    "a scale alone": (YARN | {"mscale": 0.7}, "mscale = 0.7: must be above 0, and 1 where mscale_all_dim is 0"),
    "no scale": (YARN | {"mscale": 0, "mscale_all_dim": 1}, "mscale = 0: must be above 0"),
    "a text": ({"multi_latent_attention": "yes"}, "multi_latent_attention = 'yes': must be true or false"),
}
NOT_SAID = {
    "linear": (RopeScaling("linear", 2.0), "model.rope_scaling.kind = linear: Megatron's latent attention has yarn"),
    "fractions": (replace(SCALED, truncate=False), "has no arguments for model.rope_scaling.truncate = False"),
    "a factor": (replace(SCALED, attention_factor=1.5), "no arguments for model.rope_scaling.attention_factor = 1.5"),
    "one of two": (replace(SCALED, mscale=0.7), "mscale = 0.7: must be above 0, and 1 where mscale_all_dim is 0"),
}


@pytest.mark.parametrize("case", MEANT)
def test_arguments_mean_latent_attention(case: str) -> None:
    more, scaling = MEANT[case]
    told = {key: value for key, value in (arguments(LATENT) | more).items() if value is not None}
    assert model_of(told, "file") == replace(LATENT, rope_scaling=scaling)


@pytest.mark.parametrize("case", REFUSED)
def test_what_megalite_lacks_is_refused_by_name(case: str) -> None:
    more, told = REFUSED[case]
    with pytest.raises(InputError, match=re.escape(told)):
        model_of(arguments(LATENT) | more, "file")


@pytest.mark.parametrize("case", NOT_SAID)
def test_what_megatron_cannot_say_is_refused_by_name(case: str) -> None:
    scaling, told = NOT_SAID[case]
    with pytest.raises(InputError, match=re.escape(told)):
        arguments_of(replace(LATENT, rope_scaling=scaling), Split(), 384, "float32")


@pytest.mark.parametrize("scaling", [scaling for _, scaling in MEANT.values()], ids=MEANT)
def test_arguments_come_back(scaling: RopeScaling | None) -> None:
    model: Model = replace(LATENT, rope_scaling=scaling)
    assert model_of(arguments_of(model, Split(), 384, "float32"), "file") == model
