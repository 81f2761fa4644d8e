"""Matrices that stay in bf16 where products are in 8 bits, rules of its keys, and its share of the planner."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.rules.train import train_rules
from megalite.config.schema import Batch, Config, Curriculum, Train
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import predict
from megalite.plan.float8 import float8_text, wide_weights
from megalite.plan.pipeline import uses_copies

MODEL = Model(layers=3, width=64, heads=4, kv_heads=2, ffn=96, vocab_size=100, sequence_length=32)

FOUR = ["attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up", "mlp.down"]  # stay with 4 ranks of tp


def configured(tp: int = 1, cp: int = 1, **train: Any) -> Config:
    return Config(
        model=MODEL, parallel=Parallel(tp=tp, cp=cp, dp_shard=1), train=replace(Train(precision="fp8"), **train)
    )


@pytest.mark.parametrize(("tp", "wide"), [(1, []), (2, []), (4, FOUR)])
def test_parts_that_are_no_multiples_of_16_stay_in_bf16(tp: int, wide: list[str]) -> None:
    """With 4 ranks, 8 features of keys and 24 of the MLP are on each, and 16 of queries, which share their input."""
    config = configured(tp)
    assert wide_weights(config) == [f"{layer}.{name}" for layer in range(3) for name in wide]
    for recipe in ("tensorwise", "rowwise", "mx"):
        told = f"fp8 with {recipe} scales: the matrix products of layers; all else is in bf16."
        assert float8_text(configured(tp, float8_recipe=recipe)).startswith(told)
    assert ("mlp.down of layers 0-2." in float8_text(config)) == bool(wide)
    bf16 = replace(config, train=Train())
    assert wide_weights(bf16) == []
    assert float8_text(bf16) == ""


def test_blocks_of_32_must_be_whole() -> None:
    """With 2 ranks, 16 features of keys and 48 of the MLP are on each; attention's output has 32."""
    config = configured(2, float8_recipe="mx")
    assert wide_weights(config) == [f"{layer}.{name}" for layer in range(3) for name in FOUR]
    assert "No multiples of 32 on a rank, so also in bf16: attention.q of layers 0-2;" in float8_text(config)
    assert wide_weights(configured(float8_recipe="mx")) == []


def test_all_but_products_is_as_in_bf16() -> None:
    config = configured()
    assert config.train.dtype == "bf16"
    assert uses_copies(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"float8_recipe": "rowwise"}, []),
        ({"float8_recipe": "mx"}, []),
        (
            {"float8_recipe": "mx", "cp": 2},
            [
                r"model.sequence_length = 32: must be divisible by 32 · 2 chunks · parallel.cp = 128 with "
                "train.float8_recipe = mx; change it, or use train.float8_recipe=tensorwise"
            ],
        ),
        (
            {"float8_recipe": "mx", "cp": 4},
            ["model.sequence_length = 32: must be .* = 256 with .* = mx; change it, or use train.precision=bf16"],
        ),
        ({"product": "a:b"}, ['train.precision = "fp8": cannot be used with train.product = a:b']),
        ({"compile": True}, []),
        ({"compile": True, "tp": 2}, ["train.compile = true: cannot be used with train.precision = fp8 over tp or cp"]),
        ({"cp": 4}, [r"model.sequence_length = 32: must be divisible by 16 · parallel.cp = 64 with train.precision"]),
        ({"cp": 4, "precision": "bf16"}, []),
        ({"precision": "bf16", "float8_recipe": "mx", "cp": 2}, []),
    ],
)
def test_rules(changes: dict[str, Any], said: list[str]) -> None:
    config = configured(**changes)
    found = [str(problem) for problem in train_rules(config)]
    assert len(found) == len(said)
    for text, pattern in zip(found, said, strict=True):
        assert re.match(pattern, text), text


def test_shorter_sequences_are_multiples_too() -> None:
    config = replace(configured(), batch=Batch(curriculum=Curriculum(8, 1000)))
    (problem,) = train_rules(config)
    assert str(problem).startswith("batch.curriculum.start = 8: must be divisible by 16 with train.precision = fp8")


def test_the_planner_takes_the_rates_of_8_bits_and_utilization_is_that_of_bf16() -> None:
    model = Model(layers=4, width=4096, heads=32, kv_heads=8, ffn=14336, vocab_size=32000, sequence_length=8192)
    fp8 = replace(configured(), model=model, batch=Batch(micro=1, global_=8))
    cluster = load_cluster("h100_sxm")
    fast, slow = (predict(config, cluster) for config in (fp8, replace(fp8, train=Train())))
    assert 1.05 < slow.seconds / fast.seconds < 1.5
    assert fast.mfu / slow.mfu == pytest.approx(slow.seconds / fast.seconds)
    with_blocks = replace(fp8, train=replace(fp8.train, float8_recipe="mx"))
    rowwise = predict(replace(fp8, train=replace(fp8.train, float8_recipe="rowwise")), cluster)
    assert 1.03 < rowwise.seconds / fast.seconds < 1.08  # one H200 took 1.04 times as long
    with pytest.raises(InputError, match=r'recipe = "mx": needs GPUs with MXFP8, and gpu\.peak of the cluster'):
        predict(with_blocks, cluster)
    b200 = load_cluster("b200")
    assert predict(with_blocks, b200).seconds == pytest.approx(predict(fp8, b200).seconds)  # as nobody has timed it
    rtx = load_cluster("rtx5090")
    assert predict(with_blocks, rtx).seconds < predict(fp8, rtx).seconds  # whose fp8 is slower
    wide = [predict(replace(fp8, train=Train(float8_recipe=each)), cluster) for each in ("tensorwise", "rowwise", "mx")]
    assert {each.seconds for each in wide} == {slow.seconds}
