"""The table of factors: as published, nothing at the base's sizes, and the same decay at any size."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Base, Model
from megalite.config.parametrization import Multipliers, multipliers
from megalite.config.schema import Muon, Optim
from megalite.plan.model.parametrization import Scales, scales, standard_deviation
from megalite.plan.model.weights import weights
from megalite.plan.parts import roles

OPTIM = Optim(lr=0.1, eps=1e-8, weight_decay=0.5)
STANDARD = Model(layers=8, width=512, heads=8, kv_heads=4, ffn=1024, init_std=0.04, qkv_bias=True, qk_norm=True)
MUP = replace(STANDARD, parametrization="mup", base=Base(width=128))
COMPLETEP = replace(STANDARD, parametrization="completep", base=Base(width=128, layers=2))
MATRICES = (roles.QUERY, roles.KEY, roles.UP_PROJECTION, roles.ATTENTION_OUTPUT, roles.DOWN_PROJECTION)
VECTORS = (roles.NORM, roles.HEAD_NORM, roles.QUERY.bias)
OUTSIDE = (roles.EMBEDDING, roles.HEAD, roles.FINAL_NORM)


def test_the_table_for_adamw() -> None:
    """Width 4×, depth 4×: table 1 of CompleteP (arXiv 2505.01618) at α = 1, and muP as Adam's column of table 8 of
    Tensor Programs V (arXiv 2203.03466) with the head's factor on its output."""
    for model, depth in ((MUP, 1), (COMPLETEP, 4)):
        for role in MATRICES:
            assert scales(model, OPTIM, role) == Scales(1 / 4, 0.5 * 4, 1e-8 / 4 / depth)
        for role in VECTORS:
            assert scales(model, OPTIM, role) == Scales(1, 0, 1e-8 / 4 / depth)
        for role in OUTSIDE:
            assert scales(model, OPTIM, role) == Scales(1, 0.5 if role.decays else 0, 1e-8 / 4)
        assert multipliers(model) == Multipliers(branch=1 / depth, logits=1 / 4)


def test_initial_values() -> None:
    """Half of the standard ones at width 4×; CompleteP makes projections into the residual stream no smaller."""
    for role in (roles.EMBEDDING, roles.HEAD):
        assert {standard_deviation(model, role) for model in (STANDARD, MUP, COMPLETEP)} == {0.04}
    for role in (roles.QUERY, roles.VALUE, roles.GATE):
        assert [standard_deviation(model, role) for model in (STANDARD, MUP, COMPLETEP)] == [0.04, 0.02, 0.02]
    for role in (roles.ATTENTION_OUTPUT, roles.DOWN_PROJECTION):
        assert [standard_deviation(model, role) for model in (STANDARD, MUP, COMPLETEP)] == [0.01, 0.005, 0.02]


@pytest.mark.parametrize(("scale", "factor"), [("spectral", 1), ("match_rms_adamw", 1 / 2)])
@pytest.mark.parametrize("model", [MUP, COMPLETEP])
def test_muon_scales_with_the_root_of_the_width_or_not_at_all(model: Model, scale: str, factor: float) -> None:
    """An update of √(rows/columns) in spectral norm is what any width needs; the other rule makes it √m larger."""
    optim = replace(OPTIM, name="muon", muon=Muon(scale=scale))  # type: ignore[arg-type]
    for role in MATRICES:
        assert (scales(model, optim, role).lr, scales(model, optim, role).weight_decay) == (factor, 0.5 / factor)
    for role in (*VECTORS, *OUTSIDE):
        assert scales(model, optim, role) == scales(model, OPTIM, role)


def test_scores_are_those_of_the_base_where_heads_get_wider() -> None:
    """√(base head width) / head width: as usual at the base, and smaller than 1/√e in wider heads."""
    wider = replace(MUP, heads=2, kv_heads=2, base=Base(width=128, head_width=64))  # heads of 256
    assert layer_kinds(wider)[0].attention.heads.scores.scale == multipliers(wider).scores == 8 / 256
    for same in (
        MUP,
        STANDARD,
        replace(MUP, base=Base(width=128, head_width=64)),
        replace(wider, parametrization="standard"),
    ):
        assert {kind.attention.heads.scores.scale for kind in layer_kinds(same)} == {None}
    odd = layer_kinds(replace(wider, base=Base(128, None, 255)))[0].attention.heads.scores
    assert odd.scale == math.sqrt(255) / 256


@given(
    width=st.integers(1, 1 << 14), layers=st.integers(1, 200), name=st.sampled_from(["adamw", "muon"]),
    scale=st.sampled_from(["spectral", "match_rms_adamw"]), kind=st.sampled_from(["standard", "mup", "completep"]),
    base_width=st.integers(1, 1 << 14), base_layers=st.integers(1, 200),
)  # fmt: skip
def test_decay_per_step_is_the_same_at_every_size(
    width: int, layers: int, name: str, scale: str, kind: str, base_width: int, base_layers: int
) -> None:
    """Optimizers decay by rate · λ, so λ must grow by what the rate shrinks."""
    model = Model(layers=layers, width=width, parametrization=kind, base=Base(base_width, base_layers))  # type: ignore[arg-type]
    optim = replace(OPTIM, name=name, muon=Muon(scale=scale))  # type: ignore[arg-type]
    for weight in weights(replace(model, layers=1)).values():
        found = scales(model, optim, weight.role)
        assert found.lr * found.weight_decay == pytest.approx(0.5 if weight.role.decays else 0, rel=1e-12)
        assert found.lr > 0
        assert found.eps > 0


@given(width=st.integers(1, 1 << 14), layers=st.integers(1, 200), name=st.sampled_from(["adamw", "muon"]))
def test_nothing_changes_at_the_sizes_of_the_base(width: int, layers: int, name: str) -> None:
    """But for CompleteP's initial values, to the bit."""
    plain = Model(layers=layers, width=width, head_width=8)
    optim = replace(OPTIM, name=name)  # type: ignore[arg-type]
    for kind in ("mup", "completep"):
        model = replace(plain, parametrization=kind, base=Base(width, layers, 8))  # type: ignore[arg-type]
        assert multipliers(model) == Multipliers()
        for weight in weights(replace(plain, layers=1)).values():
            assert scales(model, optim, weight.role) == scales(plain, optim, weight.role)
            expected = plain.init_std if kind == "completep" and weight.role.into_stream else None
            found = standard_deviation(model, weight.role)
            assert found == (standard_deviation(plain, weight.role) if expected is None else expected)
