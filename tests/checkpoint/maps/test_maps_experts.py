"""Experts of Hugging Face's families: both forms of their tensors, keys of config.json, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import CASES, transformers

from megalite.base.errors import InputError
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import dcp, huggingface
from megalite.checkpoint.weights.maps.families import FAMILIES, family_of
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.models import lost
from megalite.checkpoint.weights.read import reader_of
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.targets import Wanted, plan_of
from megalite.config.load import dump_model, load
from megalite.config.model_schema import Attention, Experts, Model
from megalite.plan.model.weights import weights
from megalite_tools.checkpoint.convert import main

MIXED = [name for name, case in CASES.items() if "num_experts" in case.options]
ELSEWHERE = "no original Llama has model.experts; use another kind of files"
SCALING = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
DEEPSEEK = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
PUBLISHED = {  # keys of published files, of which transformers 4 wrote some and 5 others
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "deepseek_v3": {
        **DEEPSEEK,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_scaling": {**SCALING, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    "deepseek_v2_lite": {
        **DEEPSEEK,
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": {**SCALING, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "olmoe_1b_7b": {
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
}


def meant(fields: dict[str, Any]) -> Model:
    return FAMILIES[fields["model_type"]].model(Fields("config.json", fields))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_the_preset(name: str) -> None:
    fields, preset = PUBLISHED[name], load([name]).model
    found = meant(fields)
    assert found.depth == fields.get("num_nextn_predict_layers", 0)  # which presets leave out
    assert replace(found, sequence_length=preset.sequence_length, mtp=None) == replace(
        preset, head_width=found.head_width
    )


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "deepseek" not in name])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names(key: str, name: str) -> None:
    fields = {
        other: value for other, value in PUBLISHED[name].items() if other not in ("num_experts", "num_local_experts")
    }
    default, found = (meant(fields | more).experts for more in ({}, {key: 24}))
    assert default is not None
    assert found == replace(default, count=24)
    config = transformers.AutoConfig.for_model(**fields)
    assert (default.count, default.active) == (config.num_experts, config.num_experts_per_tok)


@pytest.mark.parametrize("name", MIXED)
def test_experts_in_one_tensor_are_read_too(name: str, tmp_path: Path) -> None:
    """transformers saves what it has in memory if it is told to; from there, files are what they are otherwise."""
    CASES[name].save(tmp_path / "apart", shard="1MB")
    CASES[name].make().save_pretrained(tmp_path / "stacked", max_shard_size="20KB", save_original_format=False)
    there = open_weights(str(tmp_path / "stacked"))
    names = there.index.files
    convert(there, huggingface.plan(there, None, 10**9), tmp_path / "back", {})
    file = "model.safetensors"
    assert len(names) > 1
    assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "apart" / file).read_bytes()
    convert(there, dcp.plan(there, tmp_path / "ours", None, 1), tmp_path / "ours", {})
    found, expected = {}, {}
    for path, tensors in ((tmp_path / "ours", found), (tmp_path / "apart", expected)):
        tensors |= {f"model.{key}": torch.empty(weight.shape) for key, weight in weights(there.model).items()}
        reader_of(open_weights(str(path))).fill(tensors)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_more_experts_than_files_could_have_are_refused_at_once(tmp_path: Path) -> None:
    CASES["olmoe"].save(tmp_path, shard="1MB")
    fields = json.loads((tmp_path / "config.json").read_text())
    for changed, told in (
        ({"num_experts": 50_000}, "99 tensors, fewer than the 200,000 of"),
        ({"num_experts": 6}, "lacks"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(InputError, match=told):
            open_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("mixtral_8x7b", {"num_local_experts": 0}, "num_local_experts = 0: must be a whole number of at least 1"),
        ("mixtral_8x7b", {"num_experts_per_tok": "2"}, "num_experts_per_tok = '2': must be a whole number"),
        ("olmoe_1b_7b", {"clip_qkv": 8.0}, "clip_qkv = 8.0: clips queries, keys and values, which megalite does not"),
        ("olmoe_1b_7b", {"head_dim": 64}, "head_dim = 64: must be hidden_size / num_attention_heads"),
        ("olmoe_1b_7b", {"norm_topk_prob": 1}, "norm_topk_prob = 1: must be true or false"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]: megalite has layers without experts at"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [47]}, "mlp_only_layers"),
        ("qwen3_30b_a3b", {"mlp_only_layers": "all"}, "mlp_only_layers = 'all': must be a list of numbers of layers"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: must be a whole number"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 49}, "decoder_sparse_step = 49: leaves none of the 48 layers any"),
        ("qwen3_30b_a3b", {"moe_intermediate_size": -1}, "moe_intermediate_size = -1: must be a whole number"),
        ("gpt_oss_20b", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0: is another gate of experts"),
        (
            "gpt_oss_20b",
            {"quantization_config": {"quant_method": "fp8"}},
            "is no mxfp4; turn the weights into bf16 first",
        ),
        (
            "gpt_oss_20b",
            {"layer_types": ["full_attention"] * 23},
            "must be a list of full_attention or sliding_attention",
        ),
        ("gpt_oss_20b", {"attention_bias": 1}, "attention_bias = 1: must be true or false"),
        ("qwen3_30b_a3b", {"use_sliding_window": True}, "max_window_layers = 48: means windows in some layers or in"),
    ],
)
def test_what_experts_here_lack_is_refused_by_name(name: str, change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        meant(PUBLISHED[name] | change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mlp_only_layers": [0, 1]}, (2, 1)),
        ({"mlp_only_layers": [2, 1, 0]}, (3, 1)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0]}, (0, 2)),  # every other one begins with the second anyway
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (3, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 40]}, (0, 2)),  # these have none anyway
    ],
)
def test_layers_without_experts_may_be_the_first_and_between(change: dict[str, Any], expected: tuple[int, int]) -> None:
    experts = meant(PUBLISHED["qwen3_30b_a3b"] | change).experts
    assert experts is not None
    assert (experts.first_dense, experts.every) == expected


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            Model(experts=Experts(scores="sigmoid")),
            "mixtral, the nearest, cannot express model.experts.scores = sigmoid",
        ),
        (Model(experts=Experts(scale=2.5)), "mixtral, the nearest, cannot express model.experts.scale = 2.5"),
        (Model(experts=Experts(force_balance=True)), "cannot express model.experts.force_balance = True"),
        (
            Model(qk_norm=True, qkv_bias=True, experts=Experts(every=2)),
            "qwen3_moe, the nearest, .* model.qkv_bias = True",
        ),
        (Model(experts=Experts(gate="clamped")), "cannot express model.experts.gate = clamped"),
        (
            Model(attention=Attention(5, 2, sinks=True), qkv_bias=True, experts=Experts(gate="clamped", biases=True)),
            "gpt_oss, the nearest, cannot express model.out_bias = False",
        ),
        (Model(attention=Attention(sinks=True)), "llama, the nearest, cannot express model.attention.sinks = True"),
        (Model(attention=Attention(softcap=3.0)), "llama, the nearest, cannot express model.attention.softcap = 3.0"),
    ],
)
def test_experts_that_no_family_has_are_told(model: Model, told: str) -> None:
    with pytest.raises(InputError, match=told):
        family_of(model)


def test_losses_and_a_width_that_no_layer_has_are_nothing_of_a_config() -> None:
    """Factors of losses say nothing of what weights compute, and transformers' losses are others."""
    model = Model(ffn=96, experts=Experts(balance_loss=0.01, z_loss=0.001))
    family = family_of(model)
    again = family.model(Fields("config.json", json.loads(json.dumps(family.config(model, "float32")))))
    assert again.experts == Experts()
    assert not lost(model, again)
    assert not lost(replace(model, ffn=7, experts=Experts(width=96)), model)
    dense = Experts(width=96, first_dense=1)
    assert lost(replace(model, ffn=7, experts=dense), replace(model, experts=dense)) == ["model.ffn = 7"]


@pytest.mark.parametrize(
    ("one", "other"), [((1, 2), (0, 2)), ((2, 2), (3, 1)), ((0, 3), (2, 3)), ((3, 1), (0, 4)), ((0, 1), (0, 1))]
)
def test_the_same_layers_with_experts_may_be_told_in_two_ways(one: tuple[int, int], other: tuple[int, int]) -> None:
    first, second = (Model(experts=Experts(first_dense=first, every=every)) for first, every in (one, other))
    assert not lost(first, second)
    assert not lost(second, first)


def test_any_rate_of_correction_is_written_and_its_absence_is_not_lost() -> None:
    """Files have corrections, and not the rate at which training changes them."""
    model = meant(PUBLISHED["deepseek_v3"])
    for rate in (0.0, 0.01):
        assert (
            family_of(replace(model, experts=replace(model.experts, correction_rate=rate))).model_type == "deepseek_v3"
        )
    with pytest.raises(
        InputError, match=r"deepseek_v3, the nearest, cannot express model.experts.correction_rate = None"
    ):
        family_of(replace(model, experts=replace(model.experts, correction_rate=None)))


def test_other_layers_with_experts_are_others() -> None:
    models = [
        Model(experts=Experts(first_dense=first, every=every)) for first, every in ((0, 1), (1, 1), (0, 2), (0, 4))
    ]
    assert all(bool(lost(one, other)) == (one != other) for one in models for other in models)


def test_an_original_llama_neither_takes_nor_gives_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CASES["mixtral"].save(tmp_path / "hf", torch.bfloat16)
    CASES["llama"].save(tmp_path / "llama", torch.bfloat16)
    with pytest.raises(InputError, match=ELSEWHERE):
        plan_of("meta", open_weights(str(tmp_path / "hf")), tmp_path / "out", Wanted())
    assert main(["--from", f"{tmp_path}/hf", "--to", f"meta:{tmp_path}/out"]) == 2
    assert main(["--from", f"{tmp_path}/llama", "--to", f"meta:{tmp_path}/theirs"]) == 0
    (tmp_path / "model.yaml").write_text(dump_model(open_weights(str(tmp_path / "hf")).model))
    given = ["--config", f"{tmp_path}/model.yaml"]
    assert main(["--from", f"{tmp_path}/theirs", "--to", f"hf:{tmp_path}/out", *given]) == 2
    assert capsys.readouterr().err.count(ELSEWHERE) == 2
    assert not (tmp_path / "out").exists()
