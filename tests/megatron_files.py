"""Folders of Megatron-LM, made with plain torch from the rules that are published, not through our tables."""

import io
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.read import reader_of
from megalite.config.model_schema import Attention, Experts, Latent, Model, RopeScaling
from megalite.plan.model.weights import weights

Ours = dict[str, Tensor]
FIRST = "iter_0000010/mp_rank_00_000/model_optim_rng.pt"
SMALL = Model(
    layers=4, width=16, heads=8, kv_heads=4, head_width=4, ffn=24, vocab_size=300, sequence_length=32, norm_eps=1e-6
)
MODELS = {
    "plain": replace(SMALL, kv_heads=8, head_width=None),
    "grouped": SMALL,
    "tied": replace(SMALL, tie_embeddings=True),
    "biases": replace(SMALL, qkv_bias=True),
    "head norms": replace(SMALL, qk_norm=True, qkv_bias=True, tie_embeddings=True),
    "few tokens": replace(SMALL, vocab_size=100),  # at a tensor-parallel size of 4, two ranks have padding only
}
LATENT = {"kv_heads": 8, "head_width": 10, "rotary_width": 4}
YARN = RopeScaling("yarn", 4.0, original_length=16, mscale=0.7, mscale_all_dim=1.2)
MODELS |= {
    "latent attention": replace(SMALL, **LATENT, attention=Attention(latent=Latent(12, 6, 3))),
    "latent attention, yarn": replace(
        SMALL,
        **LATENT,
        rope_scaling=replace(YARN, mscale=None, mscale_all_dim=None),
        attention=Attention(latent=Latent(None, 6, 4)),
    ),
}
MIXED = {
    "experts": replace(SMALL, experts=Experts(count=6, active=2, width=8)),
    "experts in some layers": replace(
        SMALL, experts=Experts(count=4, active=3, width=24, every=2, normalize=False), qk_norm=True
    ),
    "experts after a dense layer": replace(
        SMALL, tie_embeddings=True, experts=Experts(count=6, width=8, first_dense=1, scores="sigmoid", scale=2.5)
    ),
    "one expert of a token": replace(SMALL, kv_heads=8, experts=Experts(count=2, active=1, width=40, normalize=False)),
    "sigmoid, one expert of a token": replace(
        SMALL, experts=Experts(count=3, active=1, width=24, scores="sigmoid", normalize=False)
    ),
    "experts beside a shared one": replace(SMALL, experts=Experts(count=6, width=8, shared_width=12, shared_gate=True)),
    "corrected experts in groups": replace(
        SMALL,
        experts=Experts(
            count=6,
            active=4,
            width=8,
            first_dense=1,
            scores="sigmoid",
            groups=3,
            active_groups=2,
            correction_rate=0.01,
            shared_width=16,
        ),
    ),
    "latent attention, experts after a dense layer": replace(
        SMALL,
        **LATENT,
        tie_embeddings=True,
        rope_scaling=YARN,
        attention=Attention(latent=Latent(12, 6, 3)),
        experts=Experts(count=6, width=8, first_dense=1, scores="sigmoid", correction_rate=0.001, shared_width=8),
    ),
    "experts in groups": replace(SMALL, experts=Experts(count=6, width=8, groups=3, active_groups=2)),
}


class Part(NamedTuple):
    """Experts of one of `ep` ranks. split: tensor-parallel ranks share matrices of experts too."""

    ep: int = 1
    rank: int = 0
    split: bool = True


WHOLE = Part()


def random_weights(model: Model, dtype: torch.dtype = torch.float32) -> Ours:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(weight.shape, generator=generator).to(dtype if weight.trained else torch.float32)
        for name, weight in weights(model).items()
    }


def trained(ours: Ours) -> Ours:
    """Those that an optimizer updates."""
    return {name: tensor for name, tensor in ours.items() if not name.endswith("router.correction")}


def arguments(model: Model, tp: int = 1, pp: int = 1, virtual: int = 1) -> dict[str, Any]:
    """As Megatron saves them, and some of the many that mean nothing for the weights."""
    return {
        "num_layers": model.layers,
        "hidden_size": model.width,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads if model.kv_heads != model.heads else 1,
        "group_query_attention": model.kv_heads != model.heads,
        "kv_channels": model.head_size,
        "rotary_base": int(model.rope_theta),
        "rotary_percent": 1.0,
        "norm_epsilon": model.norm_eps,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "add_qkv_bias": model.qkv_bias,
        "add_bias_linear": False,
        "qk_layernorm": model.qk_norm,
        "padded_vocab_size": padded(model.vocab_size, tp),
        "vocab_size": model.vocab_size,
        "seq_length": model.sequence_length,
        "max_position_embeddings": model.sequence_length,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "use_rope_scaling": False,
        **expert_arguments(model),
        **latent_arguments(model),
        "init_method_std": 0.02,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "params_dtype": torch.bfloat16,
        "load": Path("a/folder"),
        "betas": (0.9, 0.95),
        "consumed_train_samples": 640,
    }


def latent_arguments(model: Model) -> dict[str, Any]:
    latent, scaling = model.attention.latent, model.rope_scaling
    if latent is None:
        return {}
    told: dict[str, Any] = {"rope_type": "rope"}
    if scaling is not None:
        told = {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "mscale": scaling.mscale or 1.0,
            "mscale_all_dim": scaling.mscale_all_dim or 0.0,
        }
    return told | {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_rank,
        "qk_head_dim": model.head_size - model.rotary_size,
        "qk_pos_emb_head_dim": model.rotary_size,
        "v_head_dim": latent.value_width,
        "qk_layernorm": True,
    }


def expert_arguments(model: Model) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {"num_experts": None}
    mixed = [mixes(model, number) for number in range(model.layers)]
    return {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": experts.width or model.ffn,
        "moe_router_topk": experts.active,
        "moe_layer_freq": 1 if all(mixed) else [int(each) for each in mixed],
        "moe_router_score_function": experts.scores,
        "moe_router_pre_softmax": experts.scores == "softmax" and not experts.normalize,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1 else None,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "expert_model_parallel_size": 1,
        **({"moe_router_num_groups": experts.groups} if experts.groups > 1 else {}),
        **({"moe_router_group_topk": experts.active_groups} if experts.groups > 1 else {}),
        **({"moe_router_enable_expert_bias": True} if experts.correction_rate is not None else {}),
        **({"moe_router_bias_update_rate": experts.correction_rate} if experts.correction_rate is not None else {}),
        **({"moe_shared_expert_intermediate_size": experts.shared_width} if experts.shared_width else {}),
        **({"moe_shared_expert_gate": True} if experts.shared_gate else {}),
    }


def mixes(model: Model, number: int) -> bool:
    """Whether the layer, counted from 0, has experts."""
    experts = model.experts
    return experts is not None and number >= experts.first_dense and (number + 1) % experts.every == 0


def padded(vocabulary: int, tp: int) -> int:
    return (vocabulary + 128 * tp - 1) // (128 * tp) * (128 * tp)


def with_padding(rows: Tensor, tp: int) -> Tensor:
    more = padded(len(rows), tp) - len(rows)
    return torch.cat([rows, rows[-1:].expand(more, -1)])


def qkv(model: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of every group its queries, its key and its value; matrices or biases."""
    groups, e = model.kv_heads, model.head_size
    rest = q.shape[1:]
    parts = [
        q.view(groups, model.heads // groups * e, *rest),
        k.view(groups, e, *rest),
        v.view(groups, e, *rest),
    ]
    return torch.cat(parts, 1).reshape(-1, *rest)


def layer(
    model: Model, ours: Ours, number: int, tp: int = 1, rank: int = 0, local: bool = False, experts: Part = WHOLE
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer on one tensor-parallel rank; experts: which of them it has."""

    def own(name: str) -> Tensor:
        return ours[f"layers.{number}.{name}"]

    def feed_forward(theirs: str, name: str) -> Iterator[tuple[str, Tensor]]:
        gate, up = (own(f"{name}.{half}.weight").chunk(tp)[rank] for half in ("gate", "up"))
        yield f"{theirs}.linear_fc1.weight", torch.cat([gate, up])
        yield f"{theirs}.linear_fc2.weight", own(f"{name}.down.weight").chunk(tp, 1)[rank]

    latent = model.attention.latent is not None
    if latent:
        yield from latent_attention(model, own, tp, rank)
    for kind in () if latent else ("weight", "bias") if model.qkv_bias else ("weight",):
        whole = qkv(model, *(own(f"attention.{name}.{kind}") for name in "qkv"))
        yield f"self_attention.linear_qkv.{kind}", whole.chunk(tp)[rank]
    yield "self_attention.linear_proj.weight", own("attention.o.weight").chunk(tp, 1)[rank]
    if mixes(model, number):
        yield "mlp.router.weight", own("mlp.router.weight")
        if f"layers.{number}.mlp.router.correction" in ours:
            yield "mlp.router.expert_bias", own("mlp.router.correction")
        if f"layers.{number}.mlp.shared.up.weight" in ours:
            yield from feed_forward("mlp.shared_experts", "mlp.shared")
        if f"layers.{number}.mlp.shared_gate.weight" in ours:
            yield "mlp.shared_experts.gate_weight", own("mlp.shared_gate.weight")
        gate, up, down = (own(f"mlp.experts.{name}.weight") for name in ("gate", "up", "down"))
        each, at, divided = len(gate) // experts.ep, experts.rank, (tp, rank) if experts.split else (1, 0)
        for here, expert in enumerate(range(at * each, (at + 1) * each)):
            ways, way = divided
            both = torch.cat([gate[expert].chunk(ways)[way], up[expert].chunk(ways)[way]])
            for name, matrix in (("linear_fc1", both), ("linear_fc2", down[expert].chunk(ways, 1)[way])):
                place = f"local_experts.{here}.{name}.weight" if local else f"{name}.weight{here}"
                yield f"mlp.experts.{place}", matrix
    else:
        yield from feed_forward("mlp", "mlp")
    apart = local or latent
    yield (
        ("input_layernorm.weight" if apart else "self_attention.linear_qkv.layer_norm_weight"),
        own("attention_norm.weight"),
    )
    if latent:
        for name in ("q", "kv") if f"layers.{number}.attention.q_norm.weight" in ours else ("kv",):
            place = f"{name}_layernorm.weight" if local else f"linear_{name}_up_proj.layer_norm_weight"
            yield f"self_attention.{place}", own(f"attention.{name}_norm.weight")
    apart = local or mixes(model, number)
    yield ("pre_mlp_layernorm.weight" if apart else "mlp.linear_fc1.layer_norm_weight"), own("mlp_norm.weight")
    if model.qk_norm:
        yield "self_attention.q_layernorm.weight", own("attention.q_norm.weight")
        yield "self_attention.k_layernorm.weight", own("attention.k_norm.weight")


def latent_attention(model: Model, own: Callable[[str], Tensor], tp: int, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Of every head the features that do not turn come first, in keys those that all heads share."""
    latent, turning = model.attention.latent, model.rotary_size
    assert latent is not None

    def heads(*names: str) -> list[Tensor]:
        return [own(f"attention.{name}.weight").unflatten(0, (model.heads, -1)) for name in names]

    def cut(each: Tensor) -> Tensor:
        return each.flatten(0, 1).chunk(tp)[rank]

    if latent.query_rank is not None:
        yield "self_attention.linear_q_down_proj.weight", own("attention.q_down.weight")
    (queries,) = heads("q" if latent.query_rank is None else "q_up")
    place = "linear_q_proj" if latent.query_rank is None else "linear_q_up_proj"
    yield f"self_attention.{place}.weight", cut(torch.cat([queries[:, turning:], queries[:, :turning]], 1))
    down = [own(f"attention.{name}.weight") for name in ("kv_down", "k_shared")]
    yield "self_attention.linear_kv_down_proj.weight", torch.cat(down)
    yield "self_attention.linear_kv_up_proj.weight", cut(torch.cat(heads("k_up", "v_up"), 1))


def stage(
    model: Model, ours: Ours, layers: range, tp: int = 1, rank: int = 0, local: bool = False, experts: Part = WHOLE
) -> "OrderedDict[str, Any]":
    """The state of a virtual stage's model. Layers have numbers of their own."""
    first, last = layers.start == 0, layers.stop == model.layers
    state: OrderedDict[str, Any] = OrderedDict()
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    if first:
        state["embedding.word_embeddings.weight"] = with_padding(ours["embed.weight"], tp).chunk(tp)[rank]
    for here, number in enumerate(layers):
        for name, tensor in layer(model, ours, number, tp, rank, local, experts):
            state[f"decoder.layers.{here}.{name}"] = tensor
        if not local:
            state[f"decoder.layers.{here}.self_attention.linear_proj._extra_state"] = None
    if last:
        state["decoder.final_layernorm.weight"] = ours["head.norm.weight"]
        if not model.tie_embeddings or not first:
            name = "embed.weight" if model.tie_embeddings else "head.output.weight"
            state["output_layer.weight"] = with_padding(ours[name], tp).chunk(tp)[rank]
    return state


def write_legacy(
    path: Path,
    model: Model,
    ours: Ours,
    tp: int = 1,
    pp: int = 1,
    virtual: int = 1,
    local: bool = False,
    ep: int = 1,
    split: bool = True,
    **more: Any,
) -> None:
    """Iteration 10 in the older format; `more` goes into every file.

    ep: ranks that share out experts. split: tensor-parallel ranks share their matrices too, else tensor-parallel ranks
    are some of those that have other experts, so not all combinations are there.
    """
    told = arguments(model, tp, pp, virtual)
    if ep > 1:
        told |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp if split else 1}
    for rank, pipeline, at in product(range(tp), range(pp), range(ep)):
        if not split and at % tp != rank % ep:
            continue
        content: dict[str, Any] = {"args": Namespace(**told), "checkpoint_version": 3.0, "iteration": 10}
        for chunk in range(virtual):
            # Megatron's rule: the first layer of a chunk is chunk · (L / V) + rank · (L / (P · V)).
            each = model.layers // (pp * virtual)
            first = chunk * (model.layers // virtual) + pipeline * each
            key = "model" if virtual == 1 else f"model{chunk}"
            content[key] = stage(model, ours, range(first, first + each), tp, rank, local, Part(ep, at, split))
        name = f"mp_rank_{rank:02d}" + (f"_{pipeline:03d}" if pp > 1 else "") + (f"_{at:03d}" if ep > 1 else "")
        folder = path / "iter_0000010" / name
        folder.mkdir(parents=True)
        content = {key: own(value) for key, value in content.items()}
        torch.save(content | more, folder / "model_optim_rng.pt")
    (path / "latest_checkpointed_iteration.txt").write_text("10")


def write_dist(path: Path, model: Model, ours: Ours, tp: int = 1, stacked: bool = True, **more: Tensor) -> None:
    """Iteration 10 as `torch_dist`: whole tensors, saved by PyTorch. stacked: layers that are alike have one."""
    tensors = dist_tensors(model, ours, tp, stacked)
    tensors["decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"] = io.BytesIO(b"not a tensor")
    folder = path / "iter_0000010"
    dcp.save(tensors | more, checkpoint_id=folder, no_dist=True)
    torch.save(
        {"args": Namespace(**arguments(model, tp)), "checkpoint_version": 3.0, "iteration": 10}, folder / "common.pt"
    )
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (path / "latest_checkpointed_iteration.txt").write_text("10\n")


def dist_tensors(model: Model, ours: Ours, tp: int = 1, stacked: bool = True) -> dict[str, Any]:
    """The tensors of `torch_dist`."""
    tensors: dict[str, Any] = {}
    state = stage(model, ours, range(model.layers), tp=1)
    for name in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"):
        if name in state:
            tensors[name] = state[name]
    if tp > 1:
        tensors["embedding.word_embeddings.weight"] = with_padding(ours["embed.weight"], tp)
        if not model.tie_embeddings:
            tensors["output_layer.weight"] = with_padding(ours["head.output.weight"], tp)
    layers = [with_stacked_experts(dict(layer(model, ours, number))) for number in range(model.layers)]
    if stacked and len({mixes(model, number) for number in range(model.layers)}) == 1:
        return tensors | {f"decoder.layers.{name}": torch.stack([each[name] for each in layers]) for name in layers[0]}
    named = ((number, name, tensor) for number, each in enumerate(layers) for name, tensor in each.items())
    return tensors | {f"decoder.layers.{number}.{name}": tensor for number, name, tensor in named}


def with_stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer as in `torch_dist`, which has one for all experts."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in ("linear_fc1.weight", "linear_fc2.weight"):
        if each := [tensor for key, tensor in tensors.items() if key.startswith(f"mlp.experts.{name}")]:
            found[f"mlp.experts.experts.{name}"] = torch.stack(each)
    return found


def own(value: Any) -> Any:
    """With storages of their own, as parameters have."""
    if not isinstance(value, OrderedDict):
        return value
    found = OrderedDict(
        (key, tensor.clone() if isinstance(tensor, Tensor) else tensor) for key, tensor in value.items()
    )
    found._metadata = value._metadata  # type: ignore[attr-defined]
    return found


def read(found: Weights) -> Ours:
    """All weights, by our names."""
    reader = reader_of(found)
    tensors = {
        name: torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for name, stored in found.index.tensors.items()
    }
    reader.fill(tensors)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def same(first: Ours, second: Ours) -> bool:
    """Whether two models have the same bits."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def changed(path: Path, change: Callable[[dict[str, Any]], object], file: str = FIRST) -> None:
    """Change what a file of the older format holds."""
    content = torch.load(path / file, weights_only=False)
    change(content)
    torch.save(content, path / file)
