"""Rules of latent attention, and the heads that follow."""

from dataclasses import replace

import pytest

from megalite.config.layers import Heads, layer_kinds
from megalite.config.layers import Latent as Kind
from megalite.config.model_schema import Attention, Base, Latent, Model, RopeScaling
from megalite.config.parallel_schema import Parallel
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Train

LATENT = Attention(latent=Latent(7, 5, 6))
MODEL = Model(2, 16, 4, 4, 10, 24, 32, 32, rotary_width=4, attention=LATENT)
CONFIG = Config(model=MODEL, parallel=Parallel(dp_shard=1), batch=Batch(1, 4))
MSCALE = RopeScaling("yarn", mscale=1.0)


@pytest.mark.parametrize(
    ("model", "train", "told"),
    [
        ({"kv_heads": 2}, {}, "model.kv_heads = 2: must be model.heads = 4 with model.attention.latent"),
        ({"rotary_width": None}, {}, "model.rotary_width = null: is needed for model.attention.latent"),
        ({"head_width": 4}, {}, "model.rotary_width = 4: must be less than the width of a head, 4; use a smaller even"),
        (
            {"attention": Attention(latent=Latent(7, 5, 12))},
            {},
            "model.attention.latent.value_width = 12: must be at most",
        ),
        (
            {"attention": Attention(latent=Latent(0, 5, 6))},
            {},
            "model.attention.latent.query_rank = 0: must be at least 1",
        ),
        ({"qk_norm": True}, {}, "model.qk_norm = true: cannot be used with model.attention.latent"),
        (
            {"attention": Attention(latent=Latent(7, 5, 6), scale=0.5)},
            {},
            "model.attention.scale = 0.5: cannot be used with model.attention.latent",
        ),
        ({"qkv_bias": True}, {}, "model.qkv_bias = true: cannot be used with model.attention.latent"),
        ({"out_bias": True}, {}, "model.out_bias = true: cannot be used with model.attention.latent"),
        (
            {"parametrization": "mup", "base": Base(8, None, None)},
            {},
            'model.parametrization = "mup": cannot be used with model.attention.latent',
        ),
        (
            {"rope_scaling": MSCALE, "attention": Attention()},
            {},
            "model.rope_scaling.mscale = 1.0: has no meaning without",
        ),
        ({}, {"precision": "fp8"}, 'train.precision = "fp8": cannot be used with model.attention.latent'),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_is_refused(model: dict, train: dict, told: str) -> None:
    config = replace(CONFIG, model=replace(MODEL, **model), train=Train(**train))
    assert [str(problem) for problem in validate(config, 1) if str(problem).startswith(told)]
    assert validate(CONFIG, 1) == []


def test_heads_have_values_of_their_own_width() -> None:
    assert set(layer_kinds(MODEL)) == {kind := layer_kinds(MODEL)[0]}
    assert kind.attention == Kind(Heads(4, 4, 10, 4, 6), 7, 5)
    assert (kind.rotation.width, kind.rotation.rotary_width) == (10, 4)
