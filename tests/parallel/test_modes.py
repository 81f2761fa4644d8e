"""Data-parallel modes in mixed precision; in float64 they are part of tests/test_layouts.py."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import yaml
from mode_cases import curve
from ranks import Ranks

from megalite.config.model_schema import Model
from megalite.config.parallel_schema import DataParallel, Parallel, Pipeline
from megalite.config.schema import Batch, Config, Train

MODEL = Model(4, 16, 4, 2, None, 24, 40, 16, qk_norm=True)
Curve = list[tuple[float, float]]


def configuration(
    schedule: str, mode: str, replicas: int = 1, reduce_precision: str = "fp32", pp: int = 2, m: int = 3
) -> Config:
    data = DataParallel(mode, reduce_precision)
    parallel = Parallel(pp=pp, dp_replicate=replicas, dp_shard=2, pipeline=Pipeline(schedule), data=data)
    return Config(model=MODEL, parallel=parallel, batch=Batch(1, 2 * m * replicas), train=Train(3, "bf16"))


def test_a_split_backward_and_every_mode_give_the_same_curve(ranks: Ranks) -> None:
    """Only the order of sums differs, and with it the last of the eight bits of a bf16 number."""
    expected: Curve = ranks.run(curve, configuration("1f1b", "zero3"), 3)[0]
    for schedule, mode in product(("1f1b", "zb_h1", "zbv"), ("ddp", "zero1", "zero2", "zero3")):
        found: Curve = ranks.run(curve, configuration(schedule, mode), 3)[0]
        for (loss, norm), (loss_here, norm_here) in zip(expected, found, strict=True):
            assert loss_here == pytest.approx(loss, rel=1e-3), (schedule, mode)
            assert norm_here == pytest.approx(norm, rel=1e-2), (schedule, mode)


def test_a_whole_backward_between_the_halves_of_another(ranks: Ranks, tmp_path: Path) -> None:
    """B(0, 1) finds gradients that I(0, 0) has left, with and without a reduction after each."""
    mixed = {
        "one": ([0], ["F0.0 F0.1 F0.2 I0.0 B0.1 W0.0 B0.2"]),
        "two": ([0, 1], ["F0.0 F0.1 F0.2 I0.0 B0.1 I0.2 W0.0 W0.2", "F1.0 I1.0 F1.1 B1.1 F1.2 B1.2 W1.0"]),
    }
    for name, (placement, orders) in mixed.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"name": name, "micro_batches": 3, "placement": placement, "ranks": orders}))
        sized = partial(configuration, replicas=2, pp=len(placement), m=3)
        expected: Curve = ranks.run(curve, sized("1f1b", "zero3"), 2)[0]
        for mode in ("zero1", "zero2", "zero3"):
            found: Curve = ranks.run(curve, sized(str(path), mode), 2)[0]
            for (loss, norm), (loss_here, norm_here) in zip(expected, found, strict=True):
                assert loss_here == pytest.approx(loss, rel=1e-3), (name, mode)
                assert norm_here == pytest.approx(norm, rel=1e-2), (name, mode)


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
