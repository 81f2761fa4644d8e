"""A family of models as Hugging Face transformers knows it: what its config.json means, and what its tensors hold.

A family is one file of this package. It says which of our weights every tensor is made of, and which sizes and
features its configuration tells; both are used in both directions. Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import Repr
from typing import Any

from megalite.checkpoint.maps.strips import Table, stacked
from megalite.config.errors import InputError, listing
from megalite.config.layers import layer_kinds
from megalite.config.schema import SCALING_KEYS, Attention, Model, RopeScaling
from megalite.plan.weights import weights

LARGEST = 1e300  # number; whole ones beyond are more than a float can be
SHOWN = Repr()  # of values, which may be nested deep
SHOWN.maxstring = SHOWN.maxother = 200
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
ATTENTION = {
    f"self_attn.{name}_proj.{kind}": (f"attention.{name}.{kind}",) for name in "qkv" for kind in ("weight", "bias")
}
LAYER = {  # of a Llama: their tensors of a layer, in transformers' order, and those of ours that they hold
    **ATTENTION,
    "self_attn.o_proj.weight": ("attention.o.weight",),
    "self_attn.q_norm.weight": ("attention.q_norm.weight",),
    "self_attn.k_norm.weight": ("attention.k_norm.weight",),
    "mlp.gate_proj.weight": ("mlp.gate.weight",),
    "mlp.up_proj.weight": ("mlp.up.weight",),
    "mlp.down_proj.weight": ("mlp.down.weight",),
    "input_layernorm.weight": ("attention_norm.weight",),
    "post_attention_layernorm.weight": ("mlp_norm.weight",),
}
SIZES = {  # keys of config.json that every family has, and ours
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "sequence_length",
}


@dataclass
class Fields:
    """The keys of a config.json. Methods raise InputError where a value is not what it must be."""

    file: str
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        found = self.values.get(key)
        return default if found is None else found

    def whole(self, key: str, default: int | None = None) -> int:
        found = self.get(key, default)
        if type(found) is not int or not 1 <= found < 1 << 31:
            raise self.wrong(key, "must be a whole number of at least 1")
        return found

    def number(self, key: str, default: float | None = None, within: Mapping[str, Any] | None = None) -> float:
        found = (self.values if within is None else within).get(key, default)
        if type(found) not in (int, float) or not abs(found) <= LARGEST:  # not so of NaN
            raise self.wrong(key, f"must be a number of at most {LARGEST:g}", found)
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.get(key, default)
        if type(found) is not bool:
            raise self.wrong(key, "must be true or false")
        return found

    def section(self, key: str) -> Mapping[str, Any] | None:
        found = self.get(key)
        if found is not None and not isinstance(found, dict):
            raise self.wrong(key, "must be an object or null")
        return found

    def refuse(self, key: str, expected: Any, why: str) -> None:
        """Raises InputError unless the key is left out, null, or has the only value that can be converted."""
        found = self.get(key, expected)
        if found != expected:
            raise self.wrong(key, f"{why}, which megalite does not convert")

    def wrong(self, key: str, rule: str, value: Any = None) -> InputError:
        return InputError(
            f"{self.file}: {key} = {SHOWN.repr(self.values.get(key) if value is None else value)}: {rule}"
        )


@dataclass(frozen=True)
class Family:
    """One family.

    layer: their tensors of a layer, without `model.layers.N.`, and our weights that each holds, one upon another.
    Weights that a model does not have, such as biases, are left out. defaults: what transformers takes for keys that a
    config.json may leave out. features: the model's keys beyond sizes, from the fields and the sizes. fields: the
    inverse.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    features: Callable[[Fields, Model], Mapping[str, Any]]
    fields: Callable[[Model], Mapping[str, Any]]
    layer: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LAYER)

    def table(self, model: Model) -> Table:
        """What their tensors are made of, in transformers' order."""
        ours = weights(model)
        table = {"model.embed_tokens.weight": stacked([("embed.weight", ours["embed.weight"])])}
        for number in range(model.layers):
            for name, parts in self.layer.items():
                there = [f"layers.{number}.{each}" for each in parts if f"layers.{number}.{each}" in ours]
                if there:
                    table[f"model.layers.{number}.{name}"] = stacked((each, ours[each]) for each in there)
        table["model.norm.weight"] = stacked([("head.norm.weight", ours["head.norm.weight"])])
        if not model.tie_embeddings:
            table["lm_head.weight"] = stacked([("head.output.weight", ours["head.output.weight"])])
        return table

    def model(self, fields: Fields) -> Model:
        """The model that a config.json means. Raises InputError for what megalite's layers do not have."""
        fields = Fields(fields.file, {**self.defaults, **fields.values})
        for key, (value, why) in NEUTRAL.items():
            fields.refuse(key, value, why)
        heads = fields.whole("num_attention_heads")
        sizes: dict[str, Any] = {
            ours: fields.whole(key, heads if ours == "kv_heads" else None) for key, ours in SIZES.items()
        }
        theta, scaling = rope(fields)
        model = Model(
            **sizes,
            head_width=self._head_width(fields),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=fields.number("rms_norm_eps"),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            init_std=fields.number("initializer_range", 0.02),
        )
        return replace(model, **self.features(fields, model))

    def config(self, model: Model, dtype: str) -> dict[str, Any]:
        """The config.json of a model; `dtype` is that of its tensors. Keys are what transformers 4 and 5 both read."""
        sizes = {key: getattr(model, ours) for key, ours in SIZES.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **sizes,
            "head_dim": model.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            "rope_theta": model.rope_theta,
            "rope_scaling": rope_fields(model),
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tie_embeddings,
            **self.fields(model),
            "bos_token_id": None,  # generation_config.json tells which tokens begin and end texts
            "eos_token_id": None,
            "torch_dtype": dtype,
            "use_cache": True,
        }

    @staticmethod
    def _head_width(fields: Fields) -> int | None:
        """The width of a head where it is not width / heads."""
        if fields.get("head_dim") is None:
            return None
        width, heads, found = (fields.whole(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
        return None if found * heads == width else found


NEUTRAL = {  # keys of any family: the value without effect, and what another means
    "hidden_act": ("silu", "is another activation than SwiGLU's"),
    "attention_bias": (False, "means a bias of attention's output too"),
    "mlp_bias": (False, "means biases of the feed-forward"),
    "partial_rotary_factor": (1.0, "turns a part of every head only"),
    "attn_logit_softcapping": (None, "caps scores"),
    "final_logit_softcapping": (None, "caps logits"),
    "quantization_config": (None, "means quantized weights; turn them into bf16 first"),
}


ROPE = {  # their keys of RoPE scaling, beside rope_type and factor, and ours
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}
WITHOUT_EFFECT = {"mscale": None, "mscale_all_dim": None, "truncate": True, "partial_rotary_factor": 1.0}  # only so


def rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary positions, as transformers 4 (`rope_theta`, `rope_scaling`) or 5 writes them."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or {}
    theta = fields.number("rope_theta", within={"rope_theta": fields.get("rope_theta"), **section})
    for key, value in WITHOUT_EFFECT.items():
        if section.get(key, value) not in (value, None):
            raise fields.wrong(key, f"changes RoPE in a way that megalite lacks; it must be {value}", section[key])
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in SCALING_KEYS:
        rule = f"is a kind of RoPE scaling that megalite does not know; it knows {listing(list(SCALING_KEYS), 'and')}"
        raise fields.wrong("rope_type", rule, kind)
    found: dict[str, Any] = {"kind": kind, "factor": fields.number("factor", within=section)}
    for key, ours in ROPE.items():
        if ours in SCALING_KEYS[kind] and section.get(key) is not None:
            found[ours] = fields.number(key, within=section)
    if "original_length" in SCALING_KEYS[kind]:
        original = found.get("original_length", float(fields.whole("max_position_embeddings")))
        if original < 1 or original % 1:
            raise fields.wrong("original_max_position_embeddings", "must be a whole number of at least 1", original)
        found["original_length"] = int(original)
    return theta, RopeScaling(**found)


def rope_fields(model: Model) -> dict[str, Any] | None:
    """The inverse of `rope`, but for the base."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    used = {key: getattr(scaling, ours) for key, ours in ROPE.items() if ours in SCALING_KEYS[scaling.kind]}
    told = {key: value for key, value in used.items() if value is not None}
    return {"rope_type": scaling.kind, "factor": scaling.factor, **told}


def windows(fields: Fields, model: Model, types: Sequence[str] | None) -> Attention:
    """Sliding windows of layers whose kinds are `types`, as transformers names them; None: all have the window."""
    window = fields.get("sliding_window")
    if window is None or (types is not None and SLIDING not in types):
        return Attention()
    window = fields.whole("sliding_window")
    if types is None or all(kind == SLIDING for kind in types):
        return Attention(window)
    for every in range(2, model.layers + 1):
        attention = Attention(window, every)
        if layer_types(replace(model, attention=attention)) == list(types):
            return attention
    raise fields.wrong("layer_types", "megalite has windows in all layers, or in all but every n-th")


def layer_types(model: Model) -> list[str]:
    """Which layers have windows, as transformers says it."""
    return [SLIDING if kind.attention.window is not None else FULL for kind in layer_kinds(model)]


def listed_types(fields: Fields, model: Model) -> list[str]:
    """The kinds of layers in `layer_types`, or else as `max_window_layers` says; full where windows are not in use."""
    if not fields.flag("use_sliding_window"):
        return [FULL] * model.layers
    found = fields.get("layer_types")
    if found is None:
        first = fields.whole("max_window_layers", 0) if fields.get("max_window_layers") else 0
        return [FULL if number < first else SLIDING for number in range(model.layers)]
    if not isinstance(found, list) or len(found) != model.layers or not set(found) <= {FULL, SLIDING}:
        raise fields.wrong("layer_types", f"must be a list of {FULL} or {SLIDING}, one for each of the layers")
    return found
