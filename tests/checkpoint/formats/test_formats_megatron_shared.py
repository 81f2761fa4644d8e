"""Shared experts, corrections of choices and latent attention in Megatron's files: their names, and damage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_files import MIXED, changed, dist_tensors, layer, random_weights, write_dist, write_legacy
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from megalite.base.errors import InputError
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import megatron, torch_dist

FILE = "iter_0000010/mp_rank_01/model_optim_rng.pt"  # of the second tensor-parallel rank
CORRECTED, GATED = "corrected experts in groups", "experts beside a shared one"
LATENT = "latent attention, experts after a dense layer"
Content = dict[str, Any]


def without(name: str) -> Callable[[Content], object]:
    return lambda content: content["model"].pop(f"decoder.layers.1.{name}")


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Content], object]:
    return lambda content: content["model"].update({f"decoder.layers.1.{name}": torch.zeros(shape, dtype=dtype)})


def told(**arguments: Any) -> Callable[[Content], object]:
    return lambda content: vars(content["args"]).update(arguments)


DAMAGED: dict[str, tuple[str, Callable[[Content], object], str]] = {
    "no correction": (CORRECTED, without("mlp.router.expert_bias"), r"lacks decoder\.layers\.1\.mlp\.router\.expert_b"),
    "corrections of five": (CORRECTED, put("mlp.router.expert_bias", 5), r"expert_bias \[5\] instead of \[6\]"),
    "a table of them": (CORRECTED, put("mlp.router.expert_bias", 1, 6), r"expert_bias \[1, 6\] instead of \[6\]"),
    "one that nobody told": (GATED, put("mlp.router.expert_bias", 6), r"model has not: .*\.1\.mlp\.router\.expert_b"),
    "no shared matrix": (GATED, without("mlp.shared_experts.linear_fc2.weight"), r"lacks .*shared_experts\.linear_fc2"),
    "another width": (
        GATED,
        put("mlp.shared_experts.linear_fc1.weight", 24, 16),
        r"linear_fc1\.weight \[24, 16\] instead of \[12, 16\]",
    ),
    "no gate": (GATED, without("mlp.shared_experts.gate_weight"), r"lacks .*\.1\.mlp\.shared_experts\.gate_weight"),
    "a flat gate": (GATED, put("mlp.shared_experts.gate_weight", 16), r"gate_weight \[16\] instead of \[1, 16\]"),
    "a gate that nobody told": (CORRECTED, put("mlp.shared_experts.gate_weight", 1, 16), r"has not: .*gate_weight"),
    "a bias of it": (GATED, put("mlp.shared_experts.linear_fc1.bias", 12), r"has not: .*shared_experts\.linear_fc1\.b"),
    "no norm of a latent": (LATENT, without("self_attention.linear_kv_up_proj.layer_norm_weight"), r"lacks .*kv_layer"),
    "a norm twice": (LATENT, put("self_attention.q_layernorm.weight", 12), r"has .*q_layernorm\.weight twice, once as"),
    "a part of a latent": (
        LATENT,
        put("self_attention.linear_kv_down_proj.weight", 5, 16),
        r"linear_kv_down_proj\.weight \[5, 16\] instead of \[10, 16\]",
    ),
    "queries of all features": (
        LATENT,
        put("self_attention.linear_q_proj.weight", 40, 16),
        r"has not: .*linear_q_proj",
    ),
    "fused queries": (LATENT, put("self_attention.linear_qkv.weight", 40, 16), r"has not: .*linear_qkv\.weight"),
}
HOSTILE: dict[str, tuple[str, Callable[[Content], object], str]] = {
    "a shared width beyond reason": (GATED, told(moe_shared_expert_intermediate_size=2**31 - 1), r"shared_width = 21"),
    "an odd one": (
        GATED,
        told(moe_shared_expert_intermediate_size=13),
        r"linear_fc1\.weight \[12, 16\] instead of \[1",
    ),
    "no number": (GATED, told(moe_shared_expert_intermediate_size=12.5), r"intermediate_size = 12\.5: must be a whole"),
    "a rate of nothing": (
        CORRECTED,
        told(moe_router_bias_update_rate=float("nan")),
        "bias_update_rate = nan: must be a",
    ),
    "a rate beyond reason": (CORRECTED, told(moe_router_bias_update_rate=7.0), r"correction_rate = 7"),
    "no groups": (CORRECTED, told(moe_router_num_groups=0), "moe_router_num_groups = 0: must be a whole number"),
    "more groups than experts": (CORRECTED, told(moe_router_num_groups=7), r"experts\.count = 6: must be divisible by"),
    "more than there are": (
        CORRECTED,
        told(moe_router_group_topk=4),
        r"active_groups = 4: must be at most .*groups = 3",
    ),
    "a rank beyond reason": (LATENT, told(kv_lora_rank=2**31 - 1), r"instead of|key_rank"),
    "heads of nothing": (LATENT, told(qk_head_dim=0), "qk_head_dim = 0: must be a whole number of at least 1"),
    "a scale beyond numbers": (LATENT, told(rotary_scaling_factor=1e308), "rotary_scaling_factor = 1e.308: must be a"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_rank_with_other_tensors_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, damage, message = DAMAGED[case]
    write_legacy(tmp_path, MIXED[name], random_weights(MIXED[name]), 2)
    changed(tmp_path, damage, FILE)
    with pytest.raises(InputError, match=message):
        megatron.open_folder(tmp_path)


@pytest.mark.parametrize("case", HOSTILE)
def test_arguments_that_cannot_be_are_refused_at_once(case: str, tmp_path: Path) -> None:
    name, damage, message = HOSTILE[case]
    write_legacy(tmp_path, MIXED[name], random_weights(MIXED[name]), 2)
    changed(tmp_path, damage, FILE.replace("rank_01", "rank_00"))
    with pytest.raises(InputError, match=message):
        megatron.open_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        (GATED, "decoder.layers.mlp.shared_experts.gate_weight", (4, 16)),
        (GATED, "decoder.layers.mlp.shared_experts.linear_fc2.weight", (4, 12, 16)),
        (CORRECTED, "decoder.layers.1.mlp.router.expert_bias", (7,)),
        (LATENT, "decoder.layers.0.self_attention.linear_q_up_proj.weight", (79, 12)),
    ],
)
def test_a_tensor_of_another_shape_is_told_by_its_name(
    name: str, tensor: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    write_dist(tmp_path, MIXED[name], random_weights(MIXED[name]), **{tensor: torch.zeros(shape)})
    with pytest.raises(InputError, match=rf"has {tensor} \[{', '.join(map(str, shape))}\] instead of"):
        torch_dist.open_folder(tmp_path)


@pytest.mark.parametrize("name", [GATED, CORRECTED, LATENT])
def test_modules_with_and_without_transformer_engine_find_their_tensors_and_states(name: str, tmp_path: Path) -> None:
    """Megatron loads no folder that lacks a tensor or a state that a module asks for."""
    model, ours = MIXED[name], random_weights(MIXED[name])
    write_dist(tmp_path / "theirs", model, ours)
    found = torch_dist.open_folder(tmp_path / "theirs")
    convert(found, torch_dist.plan(found), tmp_path / "to", {})
    folder = tmp_path / "to" / "release"
    wanted: dict[str, Tensor] = dist_tensors(model, ours)
    if name == LATENT:  # other models have one name for both
        layers = ((number, each) for number in range(model.layers) for each in layer(model, ours, number, local=True))
        wanted |= {f"decoder.layers.{number}.{key}": tensor for number, (key, tensor) in layers if "norm" in key}
    loaded = {key: torch.full_like(tensor, torch.nan) for key, tensor in wanted.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in wanted.items())
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    place = "3_4" if name == GATED else "0_1"  # in GATED all layers are alike
    linear = {key.removesuffix(".weight") for key in wanted if ".linear_" in key and ".experts." not in key}
    assert {key for key in linear if f"{key}._extra_state/shard_{place}" not in there} <= {
        key for key in linear if key.endswith("layer_norm_weight")
    }
