"""OLMo 3: OLMo 2 with windows in three of four layers, and YaRN in the others (arXiv 2512.13961)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.checkpoint.weights.maps.family import alternating_types, window_fields, windows
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.olmo2 import OLMO2
from megalite.checkpoint.weights.maps.rope import rope_fields_by_type, window_rope
from megalite.config.model_schema import Model

WINDOW = 4096


def _features(fields: Fields, model: Model) -> Mapping[str, Any]:
    attention = windows(fields, model, alternating_types(fields, model, 4))
    if attention.window is not None:
        attention = replace(attention, window_rope_theta=window_rope(fields, model, "rope_theta"))
    return {**OLMO2.features(fields, model), "attention": attention}


def _fields(model: Model) -> Mapping[str, Any]:
    return {**OLMO2.fields(model), **rope_fields_by_type(model), **window_fields(model, WINDOW)}


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "rope_theta": 500000.0, "sliding_window": WINDOW},
    features=_features,
    fields=_fields,
    rope_by_type=True,
)
