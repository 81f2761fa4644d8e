"""Hugging Face's models with random weights, of which ours are given a copy: what both compute must be the same."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalite.checkpoint.weights.maps.families import FAMILIES
from megalite.checkpoint.weights.maps.family import Family
from megalite.config.model_schema import Attention, Base, Experts, Latent, Model, RopeScaling
from megalite.model.decoder import Decoder
from megalite.parallel.parameter import cut, parameters
from megalite.plan.model.weights import weights

transformers = pytest.importorskip("transformers")

LENGTH = 24

LLAMA = Model(layers=2, width=32, heads=4, kv_heads=4, ffn=48, vocab_size=61, sequence_length=LENGTH, rope_theta=500.0)
# Of the 4 pairs of features of a head: one left alone, one interpolated, two stretched.
SCALING = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=32)
OLMO2 = replace(LLAMA, norm="post", qk_norm=True, qk_norm_width="all")
OLMOE = replace(OLMO2, norm="pre")
QWEN3_MOE = replace(LLAMA, kv_heads=2, qk_norm=True, head_width=12)
DEEPSEEK = replace(LLAMA, head_width=20, rotary_width=8, attention=Attention(latent=Latent(14, 12, 6)))
# One pair left alone, one interpolated, two stretched.
YARN = RopeScaling("yarn", factor=8.0, original_length=64, beta_fast=8.0, beta_slow=1.0)
GPT_OSS = replace(
    LLAMA,
    layers=4,
    kv_heads=2,
    head_width=12,
    qkv_bias=True,
    out_bias=True,
    rope_scaling=replace(YARN, truncate=False),
    attention=Attention(window=5, full_every=2, sinks=True),
    experts=Experts(7, 3, gate="clamped", biases=True),
)
GEMMA3 = replace(
    LLAMA,
    layers=4,
    kv_heads=2,
    head_width=12,
    norm="both",
    norm_gain="one_plus_weight",
    activation="gelu",
    tie_embeddings=True,
    qk_norm=True,
    embedding_multiplier=32**0.5,
    rope_scaling=RopeScaling("linear", 3.0),
    attention=Attention(window=7, full_every=3, window_rope_theta=50.0, scale=20**-0.5),
)
GEMMA2 = replace(
    GEMMA3,
    qk_norm=False,
    rope_scaling=None,
    logits_softcap=5.0,
    attention=Attention(window=7, full_every=2, scale=20**-0.5, softcap=1.0),
)
# Four pairs of features of a head; sequences of the tests are longer than a single token.
LONG = RopeScaling(
    "longrope", 8.0, original_length=1, attention_factor=1.2, short_factors=[1.0] * 4, long_factors=[1.0, 1.5, 3.0, 9.0]
)
MODELS = {
    "llama": ("Llama", LLAMA),
    "llama_grouped_queries": ("Llama", replace(LLAMA, kv_heads=2)),
    "llama_one_kv_head": ("Llama", replace(LLAMA, kv_heads=1)),
    "llama_tied": ("Llama", replace(LLAMA, tie_embeddings=True)),
    "llama_head_width": ("Llama", replace(LLAMA, head_width=12)),
    "llama_rope_scaling": ("Llama", replace(LLAMA, rope_scaling=SCALING)),
    "llama_linear": ("Llama", replace(LLAMA, rope_scaling=RopeScaling("linear", factor=3.0))),
    "llama_yarn": ("Llama", replace(LLAMA, rope_scaling=YARN)),
    "llama_longrope": ("Llama", replace(LLAMA, rope_scaling=LONG)),
    # With sequences on both sides of the original length: transformers goes over while a text grows, and we do not.
    "llama_longrope_stretched": (
        "Llama",
        replace(LLAMA, rope_scaling=replace(LONG, original_length=12, attention_factor=None)),
    ),
    "llama_dynamic_stretched": (
        "Llama",
        replace(LLAMA, rope_scaling=RopeScaling("dynamic", factor=3.0, original_length=10)),
    ),
    "qwen2_yarn_attention_factor": (
        "Qwen2",
        replace(LLAMA, qkv_bias=True, rope_scaling=replace(YARN, attention_factor=1.5)),
    ),
    "llama_large_eps": ("Llama", replace(LLAMA, norm_eps=0.1)),
    "qwen2_bias": ("Qwen2", replace(LLAMA, kv_heads=2, qkv_bias=True)),
    "qwen3": ("Qwen3", replace(LLAMA, kv_heads=2, qk_norm=True, head_width=8)),
    "smollm3": ("SmolLM3", replace(LLAMA, layers=4, kv_heads=2, attention=Attention(nope_every=3))),
    "smollm3_no_rotary_positions": ("SmolLM3", replace(LLAMA, kv_heads=2, attention=Attention(nope_every=1))),
    "olmo2": ("Olmo2", OLMO2),
    "olmo2_grouped_queries_tied": ("Olmo2", replace(OLMO2, kv_heads=2, tie_embeddings=True, norm_eps=0.1)),
    "olmo2_head_width": ("Olmo2", replace(OLMO2, kv_heads=2, head_width=12)),
    "mistral_window": ("Mistral", replace(LLAMA, kv_heads=2, attention=Attention(window=5))),
    "qwen3_alternating_windows": (
        "Qwen3",
        replace(LLAMA, layers=4, qk_norm=True, attention=Attention(window=7, full_every=2)),
    ),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3Text", GEMMA3),
    "olmo3": ("Olmo3", replace(OLMO2, layers=4, rope_scaling=YARN, attention=Attention(7, 2, window_rope_theta=500.0))),
    # Of Gemma 2, only its attention takes part, within another family.
    "llama_capped": ("Llama", replace(LLAMA, kv_heads=2, attention=Attention(softcap=0.5))),
    "qwen3_capped_windows": (
        "Qwen3",
        replace(LLAMA, layers=4, qk_norm=True, attention=Attention(window=7, full_every=2, softcap=0.5)),
    ),
    "mixtral": ("Mixtral", replace(LLAMA, kv_heads=2, experts=Experts(5, 2))),
    "mixtral_window": (
        "Mixtral",
        replace(LLAMA, head_width=12, attention=Attention(window=5), experts=Experts(4, 2, width=20)),
    ),
    "mixtral_all_experts_tied": ("Mixtral", replace(LLAMA, tie_embeddings=True, experts=Experts(3, 3))),
    "qwen3_moe": ("Qwen3Moe", replace(QWEN3_MOE, experts=Experts(7, 3, width=20))),
    "qwen3_moe_scores_as_they_are": ("Qwen3Moe", replace(QWEN3_MOE, experts=Experts(7, 3, width=20, normalize=False))),
    "qwen3_moe_some_layers": (
        "Qwen3Moe",
        replace(QWEN3_MOE, layers=6, tie_embeddings=True, experts=Experts(4, 2, width=20, first_dense=2, every=2)),
    ),
    "qwen3_moe_window": ("Qwen3Moe", replace(QWEN3_MOE, attention=Attention(window=7), experts=Experts(4, 2))),
    "olmoe": ("Olmoe", replace(OLMOE, experts=Experts(8, 3, normalize=False))),
    "olmoe_one_expert_of_a_token": ("Olmoe", replace(OLMOE, experts=Experts(8, 1, normalize=False))),
    "olmoe_grouped_queries_tied": ("Olmoe", replace(OLMOE, kv_heads=2, tie_embeddings=True, experts=Experts(5, 2))),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss_no_windows_tied": (
        "GptOss",
        replace(
            GPT_OSS,
            tie_embeddings=True,
            rope_scaling=None,
            attention=Attention(sinks=True),
            experts=replace(GPT_OSS.experts, count=3, active=3),
        ),
    ),
    "gpt_oss_all_windows_no_biases_of_attention": (
        "GptOss",
        replace(
            GPT_OSS,
            qkv_bias=False,
            out_bias=False,
            rope_scaling=replace(YARN, attention_factor=1.5),
            attention=Attention(window=5, sinks=True),
        ),
    ),
    "qwen3_wide_heads_tied": ("Qwen3", replace(LLAMA, qk_norm=True, head_width=20, tie_embeddings=True)),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3_queries_of_the_token": (
        "DeepseekV3",
        replace(DEEPSEEK, attention=Attention(latent=Latent(None, 12, 6)), tie_embeddings=True, norm_eps=0.1),
    ),
    "deepseek_v3_yarn": ("DeepseekV3", replace(DEEPSEEK, rope_scaling=replace(YARN, mscale=1.0, mscale_all_dim=0.7))),
    "deepseek_v3_yarn_all_dim": ("DeepseekV3", replace(DEEPSEEK, rope_scaling=replace(YARN, mscale_all_dim=1.5))),
    "deepseek_v2": ("DeepseekV2", replace(DEEPSEEK, rope_scaling=replace(YARN, mscale=0.707, mscale_all_dim=0.707))),
    "deepseek_v2_lite": ("DeepseekV2", replace(DEEPSEEK, attention=Attention(latent=Latent(None, 12, 20)))),
}
FACTORS = {"parametrization": "completep", "base": Base(8, 1, 2), "embedding_multiplier": 3.0, "logits_multiplier": 2.0}
SCALED = {  # with factors that transformers does not have
    "scaled": ("Llama", replace(LLAMA, kv_heads=2, **FACTORS)),
    "scaled_windows": ("Qwen3", replace(LLAMA, qk_norm=True, attention=Attention(window=7), **FACTORS)),
    "scaled_capped": ("Llama", replace(LLAMA, kv_heads=2, attention=Attention(softcap=0.5), **FACTORS)),
}


class Float64Everywhere(TorchFunctionMode):
    """Turns every mention of float32 into float64.

    transformers computes norms, rotary angles, softmax and loss in float32 whatever the model's data type.
    In bfloat16 that is an upcast; in float64 it rounds, which would hide differences below 1e-7. Quotients of whole
    numbers, as of lengths, have the default data type.
    """

    def __enter__(self) -> "Float64Everywhere":
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(torch.float32)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def oracle_of(family: str, model: Model) -> Any:
    """transformers' model with random weights, norms included."""
    found = _family(family)
    if family != "Gemma2":  # whose caps are added to others
        model = replace(model, attention=replace(model.attention, softcap=None))
    options = {
        **found.config(model, "float64"),
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**options)
    with Float64Everywhere():
        oracle = getattr(transformers, found.architecture)(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in oracle.named_parameters():
            param.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return oracle


def as_ours(family: str, model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all parameters of transformers' model, by the names of our weights and in their shapes."""
    table = _family(family).table(model, stacked_experts=model.experts is not None)
    assert table.keys() == tensors.keys()
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, theirs in table.items():
        if theirs.turns:
            for turn, strip in enumerate(theirs.strips[: theirs.turns]):
                mine = tensors[name][..., turn :: theirs.turns]
                parts[strip.name] = [(0, mine.mT if mine.ndim == 3 else mine)]
            continue
        rows = tensors[name].reshape(-1, theirs.strips[0].width)
        for strip, part in zip(theirs.strips, rows.split([strip.height for strip in theirs.strips]), strict=True):
            parts.setdefault(strip.name, []).append((strip.rows[0], part))
    ours = weights(model)
    assert parts.keys() == ours.keys()
    found = {}
    for name, rows in parts.items():
        rows.sort(key=lambda row: row[0])
        ends = [0, *accumulate(len(part) for _, part in rows)]
        assert [first for first, _ in rows] == ends[:-1]
        found[name] = torch.cat([part for _, part in rows]).view(ours[name].shape)
    return found


def copy_weights(decoder: Decoder, oracle: Any) -> None:
    """Give our model, on one rank, the oracle's weights, and padding 0."""
    found = as_ours(oracle.config.model_type, decoder.model, dict(oracle.named_parameters()))
    with torch.no_grad():
        for name, param, _, shape in parameters(decoder):
            param.to_local().zero_()
            cut(param, shape).to_local().copy_(found[name])


def _family(name: str) -> Family:
    """The family of a name such as Qwen3Moe, or qwen3_moe."""
    (found,) = (each for kind, each in FAMILIES.items() if kind.replace("_", "") == name.replace("_", "").lower())
    return found
