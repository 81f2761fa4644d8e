"""Tensor-parallel collectives in pieces beside matrix products: what they compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gradient_cases import whole
from ranks import Ranks
from torch import Tensor
from toy_jobs import CPU, MODEL, config_of

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.parallel_schema import DataParallel, Parallel
from megalite.config.schema import Config
from megalite.plan.parts import pieces
from megalite.plan.pipeline import uses_copies
from megalite.plan.resolved import resolve
from megalite.train.build import build, build_mesh
from megalite.train.step import gradients


@contextmanager
def in_pieces(least: int = 1) -> Iterator[None]:
    """Pieces of `least` bytes pay."""
    with patch.object(pieces, "MIN_PIECE_BYTES", least):
        yield


@pytest.mark.parametrize(
    ("positions", "size", "expected"),
    [(8, 64 << 20, 4), (8, (64 << 20) - 1, 2), (8, (32 << 20) - 1, 1), (6, 64 << 20, 2), (7, 64 << 20, 1), (4, 0, 1)],
)
def test_pieces_are_equal_and_not_too_small(positions: int, size: int, expected: int) -> None:
    assert pieces.pieces(positions, size) == expected


def computed(config: Config, least: int) -> tuple[float, dict[str, Tensor]] | None:
    """A rank's loss of a batch and its gradients, as whole tensors."""
    with in_pieces(least):
        mesh = build_mesh(config, CPU)
        if mesh is None:
            return None
        job = build(resolve(config), mesh)
        loss = gradients(job, random_batch(job, 0))
    return loss.item(), whole(job)


@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [
        (Parallel(tp=2, dp_shard=1), "full"),
        (Parallel(tp=4, dp_shard=2, data=DataParallel("zero3")), "selective"),
        (Parallel(tp=2, pp=2, dp_shard=1), "none"),
    ],
    ids=["full recompute", "four ranks, zero3", "split backward"],
)
def test_pieces_compute_what_the_whole_does(parallel: Parallel, recompute: Any, ranks: Ranks) -> None:
    schedule = "zb_h1" if parallel.pp > 1 else "1f1b"
    config = config_of(Layout(), replace(MODEL, heads=4, kv_heads=4), schedule)
    config = replace(
        config,
        parallel=replace(parallel, pipeline=config.parallel.pipeline),
        train=replace(config.train, recompute=recompute),
    )
    at_once = ranks.run(computed, config, 1 << 40)[: parallel.layout.world_size]
    in_parts = ranks.run(computed, config, 1)[: parallel.layout.world_size]
    for (loss, grads), (expected_loss, expected) in zip(in_parts, at_once, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-13)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.allclose(grads[name], grad, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_pieces_compute_with_copies_of_weights(schedule: str, ranks: Ranks) -> None:
    layout = Layout(tp=2, pp=2 if schedule == "zb_h1" else 1)
    config = config_of(layout, replace(MODEL, heads=4, kv_heads=4), schedule)
    config = replace(config, train=replace(config.train, precision="bf16"))
    assert uses_copies(config)
    at_once, in_parts = (ranks.run(computed, config, least)[: layout.world_size] for least in (1 << 40, 1))
    for (loss, grads), (expected_loss, expected) in zip(in_parts, at_once, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert grads[name].dtype == torch.float32
            assert (grads[name] - grad).norm() <= 2**-7 * grad.norm(), name
