"""Tensors of Meta's original Llama files as blocks of our weights, and the meaning of params.json. Imports no torch.

Rows of a head's queries and keys are in another order: RoPE turns neighbours there, and both halves of a head here.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.base.errors import InputError, listing
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.models import (
    EXPERTS_RULE,
    checked,
    lost,
    refuse_experts,
    refuse_latent,
    refuse_mtp,
)
from megalite.checkpoint.weights.maps.strips import Strip, Theirs, part, stacked
from megalite.config.model_schema import Model, RopeScaling
from megalite.plan.model.weights import weights
from megalite.plan.parts.part import Weight

EMBEDDING, OUTPUT, NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
ROWS = {  # tensors of a layer whose rows are divided among files, and ours
    "attention.wv.weight": "attention.v.weight",
    "feed_forward.w1.weight": "mlp.gate.weight",
    "feed_forward.w3.weight": "mlp.up.weight",
}
TURNED_TENSORS = {
    "attention.wq.weight": "attention.q.weight",
    "attention.wk.weight": "attention.k.weight",
}  # rows, reordered
COLUMNS = {"attention.wo.weight": "attention.o.weight", "feed_forward.w2.weight": "mlp.down.weight"}
REPLICATED_TENSORS = {"attention_norm.weight": "attention_norm.weight", "ffn_norm.weight": "mlp_norm.weight"}
SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)  # scaling that use_scaled_rope means
LENGTHS = {True: 131_072, False: 8192}  # with scaled RoPE, and without, of a Llama 3
LLAMA_3_THETA, LLAMA_2_LENGTH = 500_000.0, 4096
FFN_ROUNDINGS = ((1.0, 256), (1.3, 1024), (1.3, 4096), (1.2, 4096), (1.5, 256))  # their multipliers, and their steps


def replicated(name: str) -> bool:
    """Return whether every file has the whole of this tensor."""
    return name == NORM or name.endswith(tuple(REPLICATED_TENSORS))


def table_of(model: Model, rank: int = 0, files: int = 1, rows: bool = True) -> dict[str, Theirs]:
    """Return how a file's tensors are made of our weights. rows: whether rows divide embeddings, as in Llama 3."""
    ours = weights(model)

    def share(size: int) -> tuple[int, int]:
        return size * rank // files, size * (rank + 1) // files

    def by_rows(name: str) -> Theirs:
        return _of((part(name, ours[name], rows=share(ours[name].shape[0])),), ours[name])

    def by_columns(name: str) -> Theirs:
        strip = part(name, ours[name], columns=share(ours[name].shape[1]))
        return Theirs((strip.height, strip.width), (strip,))

    def turned(name: str) -> Theirs:
        weight, e = ours[name], model.head_size
        first, end = share(weight.shape[0])
        order = (row - row % e + row % 2 * (e // 2) + row % e // 2 for row in range(first, end))
        return _of(tuple(part(name, weight, rows=(row, row + 1)) for row in order), weight)

    def layer(number: int) -> dict[str, Theirs]:
        own = f"layers.{number}."
        return {
            **{own + name: turned(own + there) for name, there in TURNED_TENSORS.items()},
            **{own + name: by_rows(own + there) for name, there in ROWS.items()},
            **{own + name: by_columns(own + there) for name, there in COLUMNS.items()},
            **{own + name: stacked([(own + there, ours[own + there])]) for name, there in REPLICATED_TENSORS.items()},
        }

    table = {EMBEDDING: by_rows("embed.weight") if rows else by_columns("embed.weight")}
    table[NORM] = stacked([("head.norm.weight", ours["head.norm.weight"])])
    table[OUTPUT] = by_rows("embed.weight" if model.tie_embeddings else "head.output.weight")
    for number in range(model.layers):
        table |= layer(number)
    return table


def _of(strips: tuple[Strip, ...], weight: Weight) -> Theirs:
    return Theirs((sum(strip.height for strip in strips), *weight.shape[1:]), strips)


def model_of(values: Mapping[str, Any], file: str, vocabulary: int, ffn: int, tied: bool) -> Model:
    """The model that a params.json means, with sizes that tensors tell. Raises InputError for what cannot be.

    The file does not tell the context length; taken is that of the Llama with such positions.
    """
    fields = Fields(file, values)
    for key in ("moe_args", "moe"):
        if fields.get(key) is not None:
            raise fields.wrong(key, EXPERTS_RULE)
    for key in ("quantization_args", "lora_args", "vision_chunk_size"):
        fields.refuse(key, None, "means another kind of model")
    heads = fields.whole("n_heads")
    scaled, theta = fields.flag("use_scaled_rope"), fields.number("rope_theta", 10_000.0)
    scaling = replace(SCALING, factor=fields.number("rope_scaling_factor", SCALING.factor))
    model = Model(
        layers=fields.layers("n_layers"),
        width=fields.whole("dim"),
        heads=heads,
        kv_heads=fields.whole("n_kv_heads", heads),
        ffn=ffn,
        vocab_size=vocabulary,
        sequence_length=LENGTHS[scaled] if scaled or theta == LLAMA_3_THETA else LLAMA_2_LENGTH,
        rope_theta=theta,
        rope_scaling=scaling if scaled else None,
        norm_eps=fields.number("norm_eps", 1e-5),
        tie_embeddings=tied,
    )
    if fields.get("vocab_size", -1) not in (-1, vocabulary):
        raise fields.wrong("vocab_size", f"must be the {vocabulary} rows of {OUTPUT}")
    return checked(model, file)


def params_of(model: Model) -> dict[str, Any]:
    """The params.json of a model. Raises InputError for what it cannot express, but for the context length."""
    multiplier, multiple = _ffn(model)
    values = {
        "dim": model.width,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": multiple,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
    }
    if model.rope_scaling is not None:
        values["use_scaled_rope"] = True
        if model.rope_scaling.factor != SCALING.factor:
            values["rope_scaling_factor"] = model.rope_scaling.factor
    again = model_of(values, "params.json", model.vocab_size, model.ffn, model.tie_embeddings)
    again = replace(again, sequence_length=model.sequence_length, init_std=model.init_std)  # which no file tells
    if missing := lost(model, again):
        raise InputError(f"an original Llama has no {listing(missing, 'and')}")
    return values


def check_files(model: Model, files: int) -> None:
    """Raises InputError where the tensors of a model cannot be divided among so many files."""
    refuse_experts(model, "Meta's files")
    refuse_latent(model, "Meta's files")
    refuse_mtp(model, "Meta's files")
    sizes = {key: getattr(model, key) for key in ("heads", "kv_heads", "ffn", "vocab_size")}
    for key, size in sizes.items():
        if size % files:
            raise InputError(f"{files} files: do not divide model.{key} = {size}")


def _ffn(model: Model) -> tuple[float, int]:
    """The multiplier and the step from which Meta's code computes the feed-forward width."""
    base = 2 * 4 * model.width // 3
    for multiplier, multiple in FFN_ROUNDINGS:
        if math.ceil(int(multiplier * base) / multiple) * multiple == model.ffn:
            return multiplier, multiple
    return (model.ffn + 0.5) / base, 1
