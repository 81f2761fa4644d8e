"""A layer's module, beside what plans know of it."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from megalite.config import layers
from megalite.config.layers import Rope, layer_kinds
from megalite.config.model_schema import Model
from megalite.config.schema import Kernels
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder, Layer
from megalite.model.init import initialize
from megalite.model.positions import TokenPositions
from megalite.parallel.parameter import part
from megalite.plan.parts.layer import Layer as Planned

MODEL = Model(layers=1, width=24, heads=4, kv_heads=2, ffn=40, vocab_size=36, sequence_length=12, qkv_bias=True)
PLACES = [frozenset(["before"]), frozenset(["after"]), frozenset(["before", "after"])]


@pytest.mark.parametrize(("places", "norm"), list(product(PLACES, (None, "head", "all"))))
def test_modules_have_the_weights_that_plans_name(places: frozenset[str], norm: str | None, alone: Mesh) -> None:
    (kind,) = layer_kinds(replace(MODEL, qk_norm=norm is not None, qk_norm_width=norm or "head"))
    kind = replace(kind, norms=places)
    module = Layer(MODEL, kind, alone.tp, Kernels())
    expected = {name: (weight.shape, weight.role) for name, weight in Planned(MODEL.width, kind).weights()}
    roles = {
        f"{path}.{name}": role
        for path, inner in module.named_modules()
        for name, role in getattr(inner, "roles", {}).items()
    }
    found = {name: (tuple(weight.shape), roles[name]) for name, weight in module.named_parameters()}
    assert found == expected


@pytest.mark.parametrize("places", PLACES)
def test_norms_are_where_the_kind_says(places: frozenset[str], alone: Mesh) -> None:
    (kind,) = layer_kinds(MODEL)
    module = Layer(MODEL, replace(kind, norms=places), alone.tp, Kernels()).to(torch.float64).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(part(weight), generator=generator)
    x = torch.randn(12, 2, 24, dtype=torch.float64, generator=generator)
    positions = TokenPositions.whole(MODEL, 12, x.device, x.dtype)
    how = positions.angles(kind.rotation), positions.attend(0, kind.attention.heads.scores)
    before, after = "before" in places, "after" in places
    expected = x
    for name, branch in (("attention", lambda y: module.attention(y, *how)), ("mlp", module.mlp)):
        first, last = getattr(module, f"{name}_norm"), getattr(module, f"{name}_output_norm", None)
        y = branch(first(expected) if before else expected)
        expected = expected + ((last if before else first)(y) if after else y)
    torch.testing.assert_close(sum(module(x, *how)), expected, rtol=1e-13, atol=1e-13)
    apart = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(sum(module(x - apart, *how, apart)), expected, rtol=1e-12, atol=1e-12)


def test_every_layer_turns_by_its_own_rope(alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    (near,) = layer_kinds(MODEL)
    kinds = near, replace(near, rope=Rope(7.0)), replace(near, rope=None)
    monkeypatch.setattr(layers, "_kinds", lambda *_: kinds)
    model = replace(MODEL, layers=3)
    stage = Decoder(model, alone.tp, range(3)).to(torch.float64).to_empty(device="cpu")
    initialize(stage, model, seed=0)
    tokens = torch.arange(24).view(12, 2)
    positions = TokenPositions.whole(model, 12, tokens.device, torch.float64)
    assert stage.embed is not None
    x = stage.embed(tokens)
    for number, (kind, layer) in enumerate(zip(kinds, stage.layers.values(), strict=True)):
        angles = () if kind.rotation is None else positions.angles(kind.rotation)
        x = sum(layer(x, angles, positions.attend(number, kind.attention.heads.scores)))
    assert torch.equal(stage.activations(tokens), x)
    first, second = (positions.angles(kind.rotation)[0] for kind in kinds[:2])
    assert not torch.equal(first, second)
