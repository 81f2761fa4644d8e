"""Experts in Megatron's arguments: what they mean, what they cannot say, and what megalite lacks."""

import re
from dataclasses import replace
from typing import Any

import pytest
from megatron_files import MIXED, SMALL, arguments

from megalite.base.errors import InputError
from megalite.checkpoint.weights.maps.megatron import Split, check_split
from megalite.checkpoint.weights.maps.megatron_arguments import arguments_of, model_of
from megalite.config.model_schema import Experts, Model

TOLD = {"num_experts": 8, "moe_ffn_hidden_size": 8}
MEANT: dict[str, tuple[dict[str, Any], Experts]] = {
    "defaults": ({}, Experts(8, 2, 8)),
    "width of the feed-forward": ({"moe_ffn_hidden_size": None}, Experts(8, 2)),
    "softmax first": ({"moe_router_pre_softmax": True, "moe_router_topk": 1}, Experts(8, 1, 8, normalize=False)),
    "sigmoid": (
        {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        Experts(8, 2, 8, scores="sigmoid", scale=2.5),
    ),
    "sigmoid of one": (
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
        Experts(8, 1, 8, scores="sigmoid", normalize=False),
    ),
    "a shared one": ({"moe_shared_expert_intermediate_size": 16}, Experts(8, 2, 8, shared_width=16)),
    "a gated one": (
        {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
        Experts(8, 2, 8, shared_width=16, shared_gate=True),
    ),
    "a gate of none": ({"moe_shared_expert_gate": True}, Experts(8, 2, 8)),
    "corrected": (
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        Experts(8, 2, 8, scores="sigmoid", correction_rate=0.001),
    ),
    "groups": ({"moe_router_num_groups": 4, "moe_router_group_topk": 2}, Experts(8, 2, 8, groups=4, active_groups=2)),
    "all groups": (
        {"moe_router_num_groups": 2, "moe_router_group_topk": 2, "moe_router_topk": 7},
        Experts(8, 7, 8, groups=2, active_groups=2),
    ),
    "every layer": ({"moe_layer_freq": [1, 1, 1, 1]}, Experts(8, 2, 8)),
    "all but the first": ({"moe_layer_freq": [0, 1, 1, 1]}, Experts(8, 2, 8, first_dense=1)),
    "every other": ({"moe_layer_freq": [0, 1, 0, 1]}, Experts(8, 2, 8, every=2)),
    "the last": ({"moe_layer_freq": [0, 0, 0, 1]}, Experts(8, 2, 8, first_dense=3)),
    "the third": ({"moe_layer_freq": [0, 0, 1, 0]}, Experts(8, 2, 8, every=3)),
    "losses and precision": (
        {
            "moe_router_load_balancing_type": ["seq_aux_loss"],
            "moe_aux_loss_coeff": [0.1],
            "moe_z_loss_coeff": 0.1,
            "moe_router_dtype": "fp64",
            "moe_input_jitter_eps": 0.1,
        },
        Experts(8, 2, 8),
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "groups by one score": (
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_score_function": "sigmoid"},
        "group_topk = 2: with moe_router_topk = 2 and sigmoid, groups are chosen by their 1 highest scores, which",
    ),
    "groups by three scores": (
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 6},
        "group_topk = 2: with moe_router_topk = 6 and softmax, groups are chosen by their 3 highest scores, which",
    ),
    "groups of other groups": (
        {"moe_router_group_topk": 1, "moe_router_topk": 1},
        "num_groups = None: must be a whole",
    ),
    "groups by ranks": ({"moe_router_topk_limited_devices": 2}, "limited_devices = 2: chooses groups of experts by"),
    "groups that do not divide": (
        {"moe_router_num_groups": 3, "moe_router_group_topk": 2},
        "model.experts.count = 8: must be divisible by model.experts.groups = 3",
    ),
    "a bias": ({"moe_router_enable_expert_bias": True}, "enable_expert_bias = True: Megatron has it for sigmoid"),
    "a bias of no meaning": ({"moe_router_enable_expert_bias": 1}, "enable_expert_bias = 1: must be true or false"),
    "a shared expert of no width": ({"moe_shared_expert_intermediate_size": 0}, "_size = 0: must be a whole number of"),
    "a capacity": ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor = 1.0: drops tokens"),
    "random choices": ({"moe_router_force_load_balancing": True}, "chooses experts at random"),
    "scores of inputs": ({"moe_apply_probs_on_input": True}, "multiplies what experts take by scores"),
    "a latent": ({"moe_latent_size": 8}, "experts of a narrower stream"),
    "interleaved": ({"moe_mlp_glu_interleave_size": 32}, "interleaves gate and up"),
    "Sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, "load_balancing_type = 'sinkhorn': chooses experts"),
    "Sinkhorn, listed": ({"moe_router_load_balancing_type": ["sinkhorn"]}, "chooses experts otherwise"),
    "other scores": ({"moe_router_score_function": "sqrtsoftplus"}, "= 'sqrtsoftplus': megalite's scores are softmax"),
    "the first of two layers": ({"moe_layer_freq": 2}, "moe_layer_freq = 2: megalite has layers without experts at"),
    "no layer": ({"moe_layer_freq": [0, 0, 0, 0]}, "megalite has layers without experts at the beginning, and all"),
    "too few layers": ({"moe_layer_freq": [0, 1]}, "must be a number, or a list of 0 or 1 for each of the 4 layers"),
    "layers of another kind": ({"moe_layer_freq": [0, 1, 2, 1]}, "must be a number, or a list of 0 or 1"),
    "layers of layers": ({"moe_layer_freq": [[], 1, 1, 1]}, "must be a number, or a list of 0 or 1"),
    "a negative number": ({"moe_layer_freq": -1}, "moe_layer_freq = -1: must be a number"),
    "more than there are": ({"moe_router_topk": 9}, "model.experts.active = 9: must be at most model.experts.count"),
    "a number of no experts": ({"num_experts": 0}, "num_experts = 0: must be a whole number of at least 1"),
    "a text": ({"moe_router_topk": "2"}, "moe_router_topk = '2': must be a whole number"),
}
NOT_SAID = {
    "one normalized": (Experts(8, 1), "model.experts.normalize = true, with model.experts.active = 1: Megatron has no"),
    "sigmoid of one, normalized": (Experts(8, 1, scores="sigmoid"), "no arguments for model.experts.normalize = True"),
    "sigmoid as it is": (Experts(8, 2, scores="sigmoid", normalize=False), "arguments for model.experts.normalize = F"),
    "softmax, corrected": (Experts(8, 2, correction_rate=0.1), "correction_rate = 0.1: Megatron corrects choices by"),
    "softmax, by two": (
        Experts(8, 4, groups=4, active_groups=2),
        "moe_router_group_topk = 2: with moe_router_topk = 4 and softmax, groups are chosen by their 2 highest",
    ),
    "in turn": (Experts(force_balance=True), "Megatron has no arguments for model.experts.force_balance = True"),
}


@pytest.mark.parametrize("case", MEANT)
def test_arguments_mean_experts(case: str) -> None:
    more, experts = MEANT[case]
    told = {key: value for key, value in (arguments(SMALL) | TOLD | more).items() if value is not None}
    assert model_of(told, "file") == replace(SMALL, experts=experts)


@pytest.mark.parametrize("case", REFUSED)
def test_what_megalite_lacks_is_refused_by_name(case: str) -> None:
    more, told = REFUSED[case]
    with pytest.raises(InputError, match=re.escape(told)):
        model_of(arguments(SMALL) | TOLD | more, "file")


@pytest.mark.parametrize("case", NOT_SAID)
def test_what_megatron_cannot_say_is_refused_by_name(case: str) -> None:
    experts, told = NOT_SAID[case]
    with pytest.raises(InputError, match=re.escape(told)):
        arguments_of(replace(SMALL, experts=experts), Split(), 384, "float32")


@pytest.mark.parametrize("model", MIXED.values(), ids=MIXED)
def test_arguments_are_those_that_megatron_saves(model: Model) -> None:
    ours = arguments_of(model, Split(), 384, "float32")
    theirs = {key: value for key, value in arguments(model).items() if "expert" in key or "moe" in key}
    losses = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    assert {key: ours[key] for key in theirs if key not in losses} == {
        key: value for key, value in theirs.items() if key not in losses
    }
    assert model_of(ours, "file") == model


def test_losses_do_not_carry_over_and_hinder_nothing() -> None:
    model = replace(SMALL, experts=Experts(8, 2, 8, balance_loss=0.1, z_loss=0.1))
    assert model_of(arguments_of(model, Split(), 384, "float32"), "file").experts == Experts(8, 2, 8)


def test_tensor_parallel_ranks_share_what_layers_have() -> None:
    check_split(replace(SMALL, ffn=23, experts=Experts(width=8)), Split(4))
    for experts, told in (
        (Experts(width=6), "model.experts.width = 6"),
        (Experts(width=8, every=2), "model.ffn = 23"),
        (Experts(width=8, shared_width=10), "model.experts.shared_width = 10"),
    ):
        with pytest.raises(InputError, match=f"tensor-parallel size 4: does not divide {told}"):
            check_split(replace(SMALL, ffn=23, experts=experts), Split(4))
