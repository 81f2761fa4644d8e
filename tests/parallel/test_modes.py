"""Data-parallel modes in mixed precision; in float64 they are part of tests/test_layouts.py."""

from functools import partial
from itertools import product

import pytest
from mode_cases import curve
from ranks import Ranks

from megalite.config.schema import Batch, Config, DataParallel, Model, Parallel, Pipeline, Train

MODEL = Model(4, 16, 4, 2, None, 24, 40, 16, qk_norm=True)
Curve = list[tuple[float, float]]


def configuration(schedule: str, mode: str, replicas: int = 1, reduce_precision: str = "fp32") -> Config:
    data = DataParallel(mode, reduce_precision)
    parallel = Parallel(pp=2, dp_replicate=replicas, dp_shard=2, pipeline=Pipeline(schedule), data=data)
    return Config(model=MODEL, parallel=parallel, batch=Batch(1, 6 * replicas), train=Train(3, "bf16"))


def test_a_split_backward_and_every_mode_give_the_same_curve(ranks: Ranks) -> None:
    """Only the order of sums differs, and with it the last of the eight bits of a bf16 number."""
    expected: Curve = ranks.run(curve, configuration("1f1b", "zero3"), 3)[0]
    for schedule, mode in product(("1f1b", "zb_h1", "zbv"), ("ddp", "zero1", "zero2", "zero3")):
        found: Curve = ranks.run(curve, configuration(schedule, mode), 3)[0]
        for (loss, norm), (loss_here, norm_here) in zip(expected, found, strict=True):
            assert loss_here == pytest.approx(loss, rel=1e-3), (schedule, mode)
            assert norm_here == pytest.approx(norm, rel=1e-2), (schedule, mode)


def test_replicas_of_shards(ranks: Ranks) -> None:
    hybrid = partial(configuration, replicas=2)
    expected, found = (ranks.run(curve, hybrid(schedule, "zero2"), 3)[0] for schedule in ("1f1b", "zb_h1"))
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-3)


def test_gradients_reduced_in_bf16_are_rounded(ranks: Ranks) -> None:
    wide, narrow = (configuration("1f1b", "zero2", reduce_precision=precision) for precision in ("fp32", "bf16"))
    exact, rounded = (ranks.run(curve, config, 1)[0][0] for config in (wide, narrow))
    assert rounded[0] == exact[0], "forward is the same"
    assert rounded[1] != exact[1]
    assert rounded[1] == pytest.approx(exact[1], rel=2**-7)
