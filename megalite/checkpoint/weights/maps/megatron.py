"""Tensors of Megatron-LM's GPT as blocks of our weights, whole or divided among ranks. Imports no torch.

Names are those of Megatron-Core with Transformer Engine; `known_as` turns other spellings into these. Queries, keys and
values are one tensor, group by group: the group's queries, its key and its value. Gate and up are one tensor,
too: for every tensor-parallel rank the gate's part, then the up's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megalite.base.errors import InputError
from megalite.checkpoint.weights.maps.megatron_experts import (
    ALL,
    CORRECTION,
    NORM,
    ROUTER,
    SHARED,
    Share,
    of_experts,
    of_feed_forward,
)
from megalite.checkpoint.weights.maps.megatron_latent import FUSED_NORMS, KV_NORM, MAKING_LATENTS, Q_NORM, of_latents
from megalite.checkpoint.weights.maps.models import has_experts
from megalite.checkpoint.weights.maps.strips import Strip, Table, Theirs, part, piled, stacked
from megalite.config.model_schema import Model
from megalite.plan.parts.part import Weight

VOCABULARY_STEP = 128  # a vocabulary is padded to a multiple of this times the tensor-parallel size
EMBEDDING, FINAL_NORM, OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
LAYERS, INPUT_NORM = "decoder.layers.", "input_layernorm.weight"
QKV, FC1, FC2 = "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"
NORM_BEFORE_EXPERTS, FC1_NORM = f"{NORM}.weight", f"{FC1}.layer_norm_weight"
REPLICATED_TENSORS = {  # tensors of a layer that every tensor-parallel rank has, and ours
    f"{QKV}.layer_norm_weight": "attention_norm.weight",
    Q_NORM: "attention.q_norm.weight",
    "self_attention.k_layernorm.weight": "attention.k_norm.weight",
    FC1_NORM: "mlp_norm.weight",
    ROUTER: "mlp.router.weight",
    KV_NORM: "attention.kv_norm.weight",
    CORRECTION: "mlp.router.correction",
    f"{SHARED}.gate_weight": "mlp.shared_gate.weight",
}
SPELLINGS = {  # names of a layer's tensors: in Megatron-Core without Transformer Engine, then before Megatron-Core
    INPUT_NORM: f"{QKV}.layer_norm_weight",
    **FUSED_NORMS,
    NORM_BEFORE_EXPERTS: FC1_NORM,
    "input_norm.weight": f"{QKV}.layer_norm_weight",
    "post_attention_norm.weight": FC1_NORM,
    "post_attention_layernorm.weight": FC1_NORM,
    "self_attention.query_key_value.weight": f"{QKV}.weight",
    "self_attention.query_key_value.bias": f"{QKV}.bias",
    "self_attention.dense.weight": "self_attention.linear_proj.weight",
    "mlp.dense_h_to_4h.weight": f"{FC1}.weight",
    "mlp.dense_4h_to_h.weight": f"{FC2}.weight",
}
OUTER_SPELLINGS = {  # the same of tensors outside of layers
    "decoder.final_norm.weight": FINAL_NORM,
    "word_embeddings_for_head.weight": OUTPUT,
}
LAYER = re.compile(r"(decoder\.layers\.(?:\d+\.)?)(.+)")
LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")  # where experts are modules of their own
IGNORED_TENSORS = re.compile(r".*(\._extra_state(/.*)?|\.inv_freq)")  # tensors of Transformer Engine, and of RoPE


@dataclass(frozen=True)
class Split:
    """Megatron's division of a model: tensor-parallel size, pipeline-parallel size, and virtual stages of each rank."""

    tp: int = 1
    pp: int = 1
    virtual: int = 1


WHOLE_MODEL = Split()


def known_as(name: str) -> str | None:
    """The name of a tensor as in this file; None for one that holds no weight."""
    if IGNORED_TENSORS.fullmatch(name):
        return None
    name = name.removeprefix("language_model.")
    name = f"decoder.{name.removeprefix('encoder.')}" if name.startswith("encoder.") else name
    if found := LAYER.fullmatch(name):
        if expert := LOCAL_EXPERT.fullmatch(found[2]):
            return f"{found[1]}mlp.experts.{expert[2]}{expert[1]}"
        return found[1] + SPELLINGS.get(found[2], found[2])
    return OUTER_SPELLINGS.get(name, name)


def padded(vocabulary: int, tp: int) -> int:
    """The size of a vocabulary with its padding."""
    step = VOCABULARY_STEP * tp
    return -(-vocabulary // step) * step


def check_split(model: Model, split: Split) -> None:
    """Raises InputError where the model cannot be divided so."""
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads}
    if not all(has_experts(model)):
        sizes["ffn"] = model.ffn
    if model.experts is not None:
        sizes["experts.width"] = model.experts.width or model.ffn
        sizes["experts.shared_width"] = model.experts.shared_width or 0
    for what, size in sizes.items():
        if size % split.tp:
            raise InputError(f"tensor-parallel size {split.tp}: does not divide model.{what} = {size}")
    if split.virtual > 1 and split.pp == 1:
        raise InputError(f"{split.virtual} virtual stages: Megatron has none without pipeline parallelism")
    if model.layers % (split.pp * split.virtual):
        stages = f"{split.pp} pipeline ranks with {split.virtual} virtual stages"
        raise InputError(f"{stages}: do not divide model.layers = {model.layers}")


def layer_table(model: Model, ours: Mapping[str, Weight], number: int, share: Share = ALL) -> Table:
    """Return how a layer's tensors on a rank are made of our weights, by their names in the layer."""
    e, group = model.head_size, model.heads // model.kv_heads
    own = f"layers.{number}."

    def rows(name: str, first: int, end: int) -> Strip:
        return part(own + name, ours[own + name], rows=(first, end))

    def fused(kind: str) -> Theirs:
        strips = []
        for number in range(*share.of(model.kv_heads)):
            strips.append(rows(f"attention.q.{kind}", number * group * e, (number + 1) * group * e))
            strips += [rows(f"attention.{name}.{kind}", number * e, (number + 1) * e) for name in "kv"]
        height = sum(strip.height for strip in strips)
        return Theirs((height, *ours[f"{own}attention.q.{kind}"].shape[1:]), tuple(strips))

    latent = model.attention.latent is not None
    if latent:
        attention = of_latents(model, own, ours, share)
    else:
        attention = {f"{QKV}.weight": fused("weight"), **({f"{QKV}.bias": fused("bias")} if model.qkv_bias else {})}
    table = {**attention, "self_attention.linear_proj.weight": share.columns(f"{own}attention.o.weight", ours)}
    mixed = f"{own}mlp.router.weight" in ours
    if mixed:
        table |= of_experts(own, ours, share)
    else:
        table |= of_feed_forward("mlp", f"{own}mlp", ours, share)
    present = {name: own + inside for name, inside in REPLICATED_TENSORS.items() if own + inside in ours}
    apart = {FC1_NORM: NORM_BEFORE_EXPERTS} if mixed else {}
    if latent:
        apart |= {f"{QKV}.layer_norm_weight": INPUT_NORM, **{name: fused for fused, name in FUSED_NORMS.items()}}
    return table | {apart.get(name, name): stacked([(there, ours[there])]) for name, there in present.items()}


def vocabulary(name: str, weight: Weight, size: int, share: Share = ALL) -> Theirs:
    """The rows of an embedding or an output layer on a rank; `size` is that with padding."""
    first, end = share.of(size)
    here = min(first, weight.shape[0]), min(end, weight.shape[0])
    strips = (part(name, weight, rows=here),) if here[0] < here[1] else ()
    last = part(name, weight, rows=(weight.shape[0] - 1, weight.shape[0]))
    return Theirs((end - first, weight.shape[1]), strips, last)


def chunk_table(
    model: Model, ours: Mapping[str, Weight], layers: range, size: int, share: Share = ALL, copy: bool = True
) -> Table:
    """Return how the tensors of neighbouring layers are made of our weights.

    The model's first layer comes with the embedding, its last layer with the final norm and the output. Layers are
    numbered from 0. size: of the vocabulary, with padding. copy: whether the last layers have a copy of a tied
    embedding, unless the first are with them.
    """
    table: dict[str, Theirs] = {}
    if layers.start == 0:
        table[EMBEDDING] = vocabulary("embed.weight", ours["embed.weight"], size, share)
    for local, number in enumerate(layers):
        own = layer_table(model, ours, number, share)
        table |= {f"{LAYERS}{local}.{name}": theirs for name, theirs in own.items()}
    if layers.stop == model.layers:
        table[FINAL_NORM] = stacked([("head.norm.weight", ours["head.norm.weight"])])
        name = "embed.weight" if model.tie_embeddings else "head.output.weight"
        if not model.tie_embeddings or (copy and layers.start > 0):
            table[OUTPUT] = vocabulary(name, ours[name], size, share)
    return table


def stacked_table(model: Model, ours: Mapping[str, Weight], size: int) -> Table:
    """Return how whole tensors are made of our weights, with those of all layers in one: `torch_dist`."""
    table: dict[str, Theirs] = {}
    layers: dict[str, list[Theirs]] = {}
    for name, theirs in chunk_table(model, ours, range(model.layers), size).items():
        if found := LAYER.fullmatch(name):
            layers.setdefault(LAYERS + found[2], []).append(theirs)
        else:
            table[name] = theirs
    return table | {name: piled(each) for name, each in layers.items()}


def dist_table(model: Model, ours: Mapping[str, Weight], size: int) -> Table:
    """Return `stacked_table`, or where layers differ, as Megatron has them then, a tensor of each layer."""
    if alike(model):
        return stacked_table(model, ours, size)
    return chunk_table(model, ours, range(model.layers), size, copy=False)


def alike(model: Model) -> bool:
    """Return whether all layers have the same tensors."""
    return len({*has_experts(model)}) == 1


def uniform(layers: int, split: Split) -> dict[tuple[int, int], range]:
    """The layers of every pipeline rank's every chunk, equally many in each."""
    count = layers // (split.pp * split.virtual)
    return {(rank, chunk): range(at * count, (at + 1) * count) for rank, chunk, at in places(split)}


def places(split: Split) -> Iterator[tuple[int, int, int]]:
    """Rank, chunk, and the place in the model of every chunk, in the model's order."""
    for chunk in range(split.virtual):
        for rank in range(split.pp):
            yield rank, chunk, chunk * split.pp + rank


def replicated(name: str) -> bool:
    """Return whether every tensor-parallel rank has the whole of this tensor."""
    found, whole = LAYER.fullmatch(name), {*REPLICATED_TENSORS, *MAKING_LATENTS}
    return name == FINAL_NORM or (found is not None and SPELLINGS.get(found[2], found[2]) in whole)
