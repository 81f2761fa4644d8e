from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.layers import LayerKind, Scores, layer_kinds
from megalite.config.load import load
from megalite.config.model_schema import Attention as Windows
from megalite.config.model_schema import Model, MultiToken
from megalite.plan.model.size import (
    Attention,
    Parameters,
    active_parameters,
    flops_per_token,
    head_forward_flops,
    layer_forward_flops,
    layer_matrix_flops,
    layer_parameters,
    model_parameters,
    stage_parameters,
)
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.window import attended_pairs

PRESETS = Path(__file__).parents[2] / "configs/model"
COUNTS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "mistral_7b": 7_248_023_552,
    "mistral_7b_v0.1": 7_241_732_096,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "smollm2_135m": 134_515_008,
    "smollm3_3b": 3_075_098_624,
    "olmo2_7b": 7_298_617_344,
    "olmo2_1b": 1_484_916_736,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v3": 671_026_419_200,
    "deepseek_v2_lite": 15_706_484_224,
    "qwen3_235b_a22b": 235_093_634_560,
    "olmoe_1b_7b": 6_919_161_856,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "small_60m": 58_073_600,
    "tiny": 1_115_264,
    "tiny_gqa": 1_016_960,
    "tiny_tied": 918_656,
    "tiny_moe": 2_888_832,
    "tiny_qwen": 1_115_776,
    "tiny_olmo": 1_050_496,
}
ACTIVE_COUNTS = {
    "tiny_moe": 1_119_360,
    "mixtral_8x7b": 12_879_925_248,
    "qwen3_30b_a3b": 3_353_032_704,
    "deepseek_v3": 37_552_297_472,
    "deepseek_v2_lite": 2_661_150_208,
    "qwen3_235b_a22b": 22_190_763_520,
    "olmoe_1b_7b": 1_282_017_280,
    "gpt_oss_20b": 4_187_440_704,
    "gpt_oss_120b": 5_711_982_912,
}


def first(model: Model) -> LayerKind:
    return layer_kinds(model)[0]


def preset(name: str) -> Model:
    return load([str(PRESETS / f"{name}.yaml")]).model


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert model_parameters(preset(name)).total == COUNTS[name]
    text = (PRESETS / f"{name}.yaml").read_text()
    assert f" {COUNTS[name]:,} parameters" in text
    active = ACTIVE_COUNTS.get(name, COUNTS[name])
    assert active_parameters(preset(name)).total == active
    assert active == COUNTS[name] or f"\n# {active:,} of them active." in text


def test_untied_head_counts_on_its_own() -> None:
    model = preset("qwen3_0.6b")
    model.tie_embeddings = False
    assert model_parameters(model).total == 751_632_384


def test_every_weight_of_a_small_model_by_hand() -> None:
    model = Model(
        layers=3, width=10, heads=4, kv_heads=2, head_width=6, ffn=7, vocab_size=11, qk_norm=True, qkv_bias=True
    )
    layer = layer_parameters(model, first(model))
    assert layer.attention == 10 * 24 + 24 + 2 * (10 * 12 + 12) + 24 * 10
    assert layer.mlp == 3 * 10 * 7
    assert layer.norms == 2 * 10 + 2 * 6
    whole = model_parameters(model)
    assert (whole.embedding, whole.head, whole.norms) == (110, 110, 3 * 32 + 10)
    assert whole.total == sum(astuple(whole)) == 3 * layer.total + 230
    together = replace(model, qk_norm_width="all")
    assert layer_parameters(together, first(together)).norms == 2 * 10 + 24 + 12


def test_a_token_costs_the_active_weights_of_matrices() -> None:
    model = preset("qwen3_30b_a3b")
    active = active_parameters(model)
    matrices = active.attention + active.mlp + active.head
    assert flops_per_token(model, "full") == 6 * matrices + 12 * 48 * 4096 * 4096


def test_a_token_further_ahead_costs_a_layer_a_projection_and_the_head() -> None:
    model = Model(layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocab_size=40, sequence_length=8)
    layer = flops_per_token(replace(model, layers=3)) - flops_per_token(model)
    deep = replace(model, mtp=MultiToken(3))
    assert flops_per_token(deep) - flops_per_token(model) == 3 * (layer + 6 * 16 * (2 * 16 + 40))
    kind = layer_kinds(deep)[-1]
    for tp in (1, 2):
        products = Layer(16, kind).products(tokens=8, tp=tp)
        flops = sum(2 * each.rows * each.outputs * each.inputs for each in products)
        assert flops * tp == 8 * layer_matrix_flops(deep, kind)


def test_llama3_8b_costs_the_published_flops() -> None:
    model = preset("llama3_8b")
    assert flops_per_token(model) == 51_470_401_536
    assert flops_per_token(model, "full") - flops_per_token(model) == 6 * 32 * 4096 * 8192


@given(
    st.builds(
        Model,
        layers=st.integers(1, 9),
        width=st.integers(1, 64),
        heads=st.integers(1, 8),
        kv_heads=st.integers(1, 8),
        head_width=st.integers(1, 16),
        ffn=st.integers(1, 99),
        vocab_size=st.integers(1, 99),
        sequence_length=st.integers(1, 99),
        tie_embeddings=st.booleans(),
        qk_norm=st.booleans(),
    ),
    st.integers(0, 9),
)
def test_stages_and_layers_add_up_to_the_model(model: Model, count: int) -> None:
    count = min(count, model.layers)
    whole = model_parameters(model)
    (alone,) = stage_parameters(model, [model.layers])
    assert alone == whole
    parts = stage_parameters(model, [count, 0, model.layers - count])
    copy = Parameters(head=model.vocab_size * model.width if model.tie_embeddings else 0)
    assert parts[0] + parts[1] + parts[2] == whole + copy
    assert parts[1] == Parameters()

    matrices = layer_parameters(model, first(model)).attention + layer_parameters(model, first(model)).mlp
    factors: dict[Attention, int] = {"causal": 2, "full": 4}
    for attention, factor in factors.items():
        scores = factor * model.heads * model.head_size * model.sequence_length
        assert layer_forward_flops(model, first(model), attention) == 2 * matrices + scores
        forward = model.layers * layer_forward_flops(model, first(model), attention) + head_forward_flops(model)
        assert flops_per_token(model, attention) == 3 * forward


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 5))
def test_windows_cost_the_pairs_that_they_let_attend(length: int, window: int, full_every: int) -> None:
    model = Model(layers=7, sequence_length=length, attention=Windows(window, full_every))
    kind = first(model)
    alone = replace(kind.attention, heads=replace(kind.attention.heads, scores=Scores(1)))
    without = layer_forward_flops(model, replace(kind, attention=alone), "full")
    at_diagonal = 4 * model.heads * model.head_size  # the only pairs of a window of 1
    whole = 0
    for kind in layer_kinds(model):
        window_here = min(kind.attention.heads.scores.window or length, length)
        pairs = attended_pairs(length, window_here)
        found = {name: layer_forward_flops(model, kind, name) - without + at_diagonal for name in ("causal", "full")}
        assert found["full"] == at_diagonal * window_here
        # A query's own key counts half, as it does in the half of a square.
        assert found["causal"] == pytest.approx(at_diagonal * (pairs - window_here / 2) / length, abs=1)
        whole += layer_forward_flops(model, kind)
    assert flops_per_token(model) == 3 * (whole + head_forward_flops(model))
    assert sum(kind.attention.heads.scores.window is None for kind in layer_kinds(model)) == 7 // full_every
