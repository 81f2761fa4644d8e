"""Sizes of latent attention: published ones, and the FLOPs of a layer."""

from dataclasses import replace

import pytest

from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Attention, Latent, Model
from megalite.plan.model.size import flops_per_token, layer_forward_flops
from megalite.plan.model.weights import layer_weights, weights

V3 = Model(
    layers=61,
    width=7168,
    heads=128,
    kv_heads=128,
    head_width=192,
    rotary_width=64,
    ffn=18432,
    vocab_size=129280,
    sequence_length=4096,
    attention=Attention(latent=Latent(1536, 512, 128)),
)
V2_LITE = replace(
    V3, layers=27, width=2048, heads=16, kv_heads=16, ffn=10944, vocab_size=102400, attention=Attention(latent=Latent())
)
EXPERTS = 58 * (257 * 3 * 7168 * 2048 + 256 * 7168 + 256)  # one of them shared; the router and its bias
ACTIVE_EXPERTS = 58 * (9 * 3 * 7168 * 2048 + 256 * 7168 + 256)


@pytest.mark.parametrize(("model", "elements"), [(V3, 187_107_328), (V2_LITE, 13_763_072)], ids=["V3", "V2-Lite"])
def test_weights_of_attention_are_as_many_as_published(model: Model, elements: int) -> None:
    (kind,) = set(layer_kinds(model))
    found = {name: weight for name, weight in layer_weights(model, kind) if name.startswith("attention.")}
    assert sum(weight.elements for weight in found.values()) == elements


def test_with_experts_they_make_the_published_totals() -> None:
    found = weights(replace(V3, layers=3)) | {
        name: weight for name, weight in weights(V3).items() if ".mlp." not in name
    }
    total = sum(weight.elements for weight in found.values())
    assert total + EXPERTS == 671_026_419_200
    assert total + ACTIVE_EXPERTS == 37_552_297_472


@pytest.mark.parametrize("window", [None, 1024])
def test_flops_are_those_of_matrices_and_of_scores(window: int | None) -> None:
    model = replace(V3, attention=replace(V3.attention, window=window))
    (kind,) = set(layer_kinds(model))
    matrices = sum(weight.elements for _, weight in layer_weights(model, kind) if len(weight.shape) > 1)
    seen = model.sequence_length / 2 if window is None else window - window**2 / (2 * model.sequence_length)
    scores = 2 * 128 * (192 + 128) * seen
    assert layer_forward_flops(model, kind) == 2 * matrices + scores
    assert flops_per_token(model) == 61 * 3 * (2 * matrices + scores) + 6 * model.vocab_size * model.width
