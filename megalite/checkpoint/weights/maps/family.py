"""A family of models as Hugging Face transformers knows it: what its config.json means, and what its tensors hold.

A family is one file of this package. It says which of our weights every tensor is made of, and which sizes and
features its configuration tells; both are used in both directions. Imports no torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from megalite.checkpoint.weights.maps.experts import STACKED_EXPERTS, of_experts
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.latent import strips_of_latents
from megalite.checkpoint.weights.maps.rope import (
    FULL_ATTENTION,
    ROTARY_FACTOR,
    SLIDING_ATTENTION,
    of_full_layers,
    rope,
    rope_fields,
    rows_of_heads,
)
from megalite.checkpoint.weights.maps.strips import Table, Theirs, stacked, whole
from megalite.checkpoint.weights.maps.woven import woven
from megalite.config.layers import layer_kinds
from megalite.config.model_schema import SCALING_KEYS, Attention, Model, MultiToken
from megalite.plan.model.weights import weights
from megalite.plan.parts.part import Weight

ATTENTION = {
    f"self_attn.{name}_proj.{kind}": (f"attention.{name}.{kind}",) for name in "qkv" for kind in ("weight", "bias")
}
LAYER = {  # tensors of a Llama's layer in transformers, in its order, and those of ours that they hold
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
MTP = {  # tensors that layers of multi-token prediction have beside
    "enorm.weight": ("mtp.embedding_norm.weight",),
    "hnorm.weight": ("mtp.stream_norm.weight",),
    "eh_proj.weight": ("mtp.projection.weight",),
    "shared_head.norm.weight": ("mtp.output_norm.weight",),
}
MTP_COPIES = {"embed_tokens.weight": "embed.weight", "shared_head.head.weight": "head.output.weight"}  # copies
MTP_DEPTH = "num_nextn_predict_layers"  # a key of config.json
SIZES = {  # keys of config.json that every family has, and ours
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "sequence_length",
}


@dataclass(frozen=True)
class Family:
    """One family.

    layer: their tensors of a layer, without `model.layers.N.`, and our weights that each holds, one upon another.
    Weights that a model does not have, such as biases, are left out. experts: the same of a layer's experts; empty: the
    family has none. dense: models of a family with experts may have none. defaults: what transformers takes for keys
    that a config.json may leave out. features: the model's keys beyond sizes, from the fields and the sizes. fields:
    the inverse. scalings: the kinds of RoPE scaling that transformers knows of it. partial: whether it can turn a part
    of every head. predicts_more: files may have layers of multi-token prediction, as DeepSeek-V3's.
    woven: whether tensors of experts are as `maps.woven` tells. latent: its attention is latent. rope_by_type: layers
    with windows have a RoPE of their own, which `features` reads. reads: keys of NEUTRAL_VALUES that `features` reads
    itself.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    features: Callable[[Fields, Model], Mapping[str, Any]]
    fields: Callable[[Model], Mapping[str, Any]]
    layer: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LAYER)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scalings: Collection[str] = tuple(SCALING_KEYS)
    partial: bool = False
    dense: bool = False
    predicts_more: bool = False
    woven: bool = False
    reads: Collection[str] = ()
    latent: bool = False
    rope_by_type: bool = False

    def table(self, model: Model, stacked_experts: bool = False, copies: bool = False) -> Table:
        """Return how their tensors are made of our weights, in transformers' order but for experts.

        stacked_experts: whether one tensor has all experts of a layer, as in transformers' memory. copies: also of the
        embedding and the head, which DeepSeek's files have in each layer of multi-token prediction.
        """
        experts = STACKED_EXPERTS if stacked_experts and not self.woven else self.experts
        ours, layer = weights(model), {**self.layer, **experts, **MTP}
        table = {"model.embed_tokens.weight": stacked([("embed.weight", ours["embed.weight"])])}
        for number in range(model.layers + model.depth):
            for name, parts in layer.items():
                there = [f"layers.{number}.{each}" for each in parts if f"layers.{number}.{each}" in ours]
                if there:
                    held = {each: ours[each] for each in there}
                    table |= self._named(model, f"model.layers.{number}.{name}", held)
            for name, of in MTP_COPIES.items() if copies and number >= model.layers else ():
                shared = "embed.weight" if model.tie_embeddings else of
                table[f"model.layers.{number}.{name}"] = stacked([(shared, ours[shared])])
        table["model.norm.weight"] = stacked([("head.norm.weight", ours["head.norm.weight"])])
        if not model.tie_embeddings:
            table["lm_head.weight"] = stacked([("head.output.weight", ours["head.output.weight"])])
        return table

    def model(self, fields: Fields) -> Model:
        """The model that a config.json means. Raises InputError for what megalite's layers do not have."""
        fields = Fields(fields.file, {**self.defaults, **fields.values})
        if fields.get("hidden_act") == "swish":  # another name of it
            fields.values = {**fields.values, "hidden_act": "silu"}
        for key, (value, why) in NEUTRAL_VALUES.items():
            if key not in self.reads:
                fields.refuse(key, value, why)
        heads = fields.whole("num_attention_heads")
        sizes: dict[str, Any] = {
            ours: fields.whole(key, heads if ours == "kv_heads" else None) for key, ours in SIZES.items()
        } | {"layers": fields.layers("num_hidden_layers")}
        theta, scaling, share = rope(of_full_layers(fields) if self.rope_by_type else fields, self.latent)
        if scaling is not None and scaling.kind not in self.scalings:
            raise fields.wrong("rope_type", f"is no RoPE scaling of {self.model_type} in transformers", scaling.kind)
        if share != 1 and not self.partial:
            raise fields.wrong(ROTARY_FACTOR, f"turns a part of every head, which {self.model_type} does not", share)
        model = Model(
            **sizes,
            head_width=self._head_width(fields),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=fields.number("rms_norm_eps"),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            init_std=fields.number("initializer_range", 0.02),
        )
        if self.predicts_more and (depth := fields.whole(MTP_DEPTH, 0) if fields.get(MTP_DEPTH) else 0):
            model = replace(model, mtp=MultiToken(depth))
        if (rotary_width := int(model.head_size * share)) != model.head_size:
            model = replace(model, rotary_width=rotary_width)
        return replace(model, **self.features(fields, model))

    def config(self, model: Model, dtype: str) -> dict[str, Any]:
        """The config.json of a model; `dtype` is that of its tensors. Keys are what transformers 4 and 5 both read."""
        sizes = {key: getattr(model, ours) for key, ours in SIZES.items()}
        if model.rope_scaling is not None and model.rope_scaling.kind == "dynamic":
            sizes["max_position_embeddings"] = model.rope_scaling.original_length  # longer sequences are stretched
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **sizes,
            "head_dim": model.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            **rope_fields(model),
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tie_embeddings,
            **self.fields(model),
            **({MTP_DEPTH: model.depth} if self.predicts_more else {}),
            "bos_token_id": None,  # generation_config.json tells which tokens begin and end texts
            "eos_token_id": None,
            "torch_dtype": dtype,
            "use_cache": True,
        }

    def _named(self, model: Model, name: str, parts: Mapping[str, Weight]) -> Table:
        """Their tensors called `name` that hold our weights: one, or one for each expert."""
        if not any(weight.role.of_expert for weight in parts.values()):
            return {name: _stacked(model, parts)}
        if not self.woven:
            return dict(of_experts(name, parts))
        one_of_vectors = len(parts) == 1 and len(next(iter(parts.values())).shape) == 2
        return {name: stacked(parts.items())} if one_of_vectors else dict(woven(name, parts))

    @staticmethod
    def _head_width(fields: Fields) -> int | None:
        """The width of a head where it is not width / heads."""
        if fields.get("head_dim") is None:
            return None
        width, heads, found = (fields.whole(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
        return None if found * heads == width else found


def _stacked(model: Model, parts: Mapping[str, Weight]) -> Theirs:
    """Our weights one upon another, as transformers orders their rows."""
    theirs = stacked(parts.items())
    if model.attention.latent is not None:
        return replace(theirs, strips=tuple(strips_of_latents(model, parts)))
    if model.rotary_width is None:
        return theirs
    turned = {name for name in parts if name.split(".")[-2] in ("q", "k", "q_norm", "k_norm")}
    strips = (
        rows_of_heads(name, weight, model) if name in turned else (whole(name, weight),)
        for name, weight in parts.items()
    )
    return replace(theirs, strips=tuple(chain.from_iterable(strips)))


NEUTRAL_VALUES = {  # keys of any family: the value without effect, and what another means
    "hidden_act": ("silu", "is another activation than SwiGLU's"),
    "attention_bias": (False, "means a bias of attention's output too"),
    "mlp_bias": (False, "means biases of the feed-forward"),
    "attn_logit_softcapping": (None, "caps scores"),
    "final_logit_softcapping": (None, "caps logits"),
    "quantization_config": (None, "means quantized weights; turn them into bf16 first"),
}


def windows(fields: Fields, model: Model, types: Sequence[str] | None) -> Attention:
    """Sliding windows of layers whose kinds are `types`, as transformers names them; None: all have the window."""
    window = fields.get("sliding_window")
    if window is None or (types is not None and SLIDING_ATTENTION not in types):
        return Attention()
    window = fields.whole("sliding_window")
    if types is None or all(kind == SLIDING_ATTENTION for kind in types):
        return Attention(window)
    attention = Attention(window, list(types).index(FULL_ATTENTION) + 1)
    if layer_types(replace(model, attention=attention)) == list(types):
        return attention
    raise fields.wrong("layer_types", "megalite has windows in all layers, or in all but every n-th")


def layer_types(model: Model) -> list[str]:
    """List transformers' type of each layer: with a window or without."""
    return [
        SLIDING_ATTENTION if kind.attention.heads.scores.window is not None else FULL_ATTENTION
        for kind in layer_kinds(model)[: model.layers]
    ]


def window_fields(model: Model, window: int) -> dict[str, Any]:
    """Windows and kinds of layers. window: written where no layer has one, as transformers wants some number."""
    return {"sliding_window": model.attention.window or window, "layer_types": layer_types(model)}


def listed_types(fields: Fields, model: Model) -> list[str]:
    """The kinds of layers in `layer_types`, or else as `max_window_layers` says; full where windows are not in use."""
    if not fields.flag("use_sliding_window"):
        return [FULL_ATTENTION] * model.layers
    if fields.get("layer_types") is None:
        first = fields.whole("max_window_layers", 0) if fields.get("max_window_layers") else 0
        return [FULL_ATTENTION if number < first else SLIDING_ATTENTION for number in range(model.layers)]
    return _given_types(fields, model)


def alternating_types(fields: Fields, model: Model, every: int) -> list[str]:
    """The kinds of layers in `layer_types`, or else a window in all but every n-th."""
    if fields.get("layer_types") is None:
        return [SLIDING_ATTENTION if number % every else FULL_ATTENTION for number in range(1, model.layers + 1)]
    return _given_types(fields, model)


def _given_types(fields: Fields, model: Model) -> list[str]:
    found = fields.get("layer_types")
    if (
        not isinstance(found, list)
        or len(found) != model.layers
        or not set(found) <= {FULL_ATTENTION, SLIDING_ATTENTION}
    ):
        raise fields.wrong(
            "layer_types", f"must be a list of {FULL_ATTENTION} or {SLIDING_ATTENTION}, one for each of the layers"
        )
    return found
