"""What Muon costs on a device: symmetric products by half, passes as the kernels make them, matrices found once."""

from unittest.mock import patch

import pytest
import torch
from test_cost_predict import H100, TIMER, configured

from megalite.cost import muon
from megalite.cost.muon import (
    SYMMETRIC_ROWS,
    TORCH_SURPLUS,
    _exchanged,
    computed_flops,
    muon_matrices,
    muon_parameters,
    symmetric_rows,
)
from megalite.cost.predict import predict
from megalite.cost.program import MEGALITE
from megalite.plan.muon import Matrix, MuonPlan, moves, stage_matrices
from megalite.plan.resolved import resolve
from megalite_kernels.grad_norm import bytes_moved as norm_bytes
from megalite_kernels.muon import bytes_moved
from megalite_kernels.symmetric_product import MIN_ROWS

WIDE = "optim.name=muon", "batch.global=64", "run.device=cuda"


def test_numbers_are_those_of_the_kernels() -> None:
    assert SYMMETRIC_ROWS == MIN_ROWS
    moved = bytes_moved(1)[0] + 2 * 2  # a result is copied into the buffer that returns it
    assert moved + norm_bytes(1, torch.float32)[0] == MEGALITE.optimizer
    assert moved + TORCH_SURPLUS == 100, "both are counted by test_optim_muon_kernels.py"


@pytest.mark.parametrize("shape", [(4096, 14336), (14336, 4096), (4096, 4096)])
def test_two_products_of_three_are_halved(shape: tuple[int, int]) -> None:
    m, n = sorted(shape)
    matrix = Matrix(shape, ())
    assert matrix.flops == 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    assert computed_flops(matrix, m) == 5 * (m * m * n + m**3 + 2 * m * m * n)
    assert computed_flops(matrix, m + 1) == matrix.flops


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ((), SYMMETRIC_ROWS),
        (("kernels=triton",), 0),
        (("kernels.muon=torch",), float("inf")),
        (("train.precision=fp64",), float("inf")),
        (("run.device=cpu", "train.precision=fp32"), float("inf")),
    ],
)
def test_products_are_halved_where_the_kernel_runs(keys: tuple[str, ...], rows: float) -> None:
    assert symmetric_rows(configured(8, *WIDE, *keys)) == rows


def test_kernels_save_operations_and_bytes() -> None:
    """Of 8 GPUs with one replica and Llama 3 8B, whose matrices have 4096 rows or 1024 at least."""
    slow, fast = (
        predict(configured(8, *WIDE, f"kernels.muon={kernel}", model="llama3_8b"), H100, TIMER).parts["optimizer"]
        for kernel in ("torch", "auto")
    )
    m, n = 4096, 14336
    large = 32 * (2 * m * m * (m + m) + 3 * m * m * (n + m)) * 5 / 8
    passes = 32 * (2 * m * m + 2 * 1024 * m + 3 * m * n) / 8 * TORCH_SURPLUS
    saved = large / (TIMER.kernels.rate("bf16") * muon.RATE_SHARE) + TIMER.kernels.passes(passes)
    assert slow - fast == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_a_rank_updates_the_matrices_of_its_own_experts(mode: str) -> None:
    """Two experts of eight are whole on a rank. Matrices of attention are shared out over data parallelism."""
    keys = f"parallel.data.mode={mode}", "parallel.ep=4", "kernels.muon=triton"
    config = configured(4, *WIDE, *keys, model="mixtral_8x7b")
    plan = resolve(config)
    own = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 8 * 4096)  # the last is the router
    shards = 1 if mode == "ddp" else 4
    assert muon_parameters(plan, 0) == own / shards + 32 * 2 * 3 * 4096 * 14336


def test_matrices_are_found_once() -> None:
    with patch.object(muon, "_matrices", wraps=muon._matrices) as found:
        predict(configured(8, *WIDE, "parallel.pp=2"), H100, TIMER)
    assert [call.args[1] for call in found.mock_calls] == [0, 1]


EXPERTS = "model.experts.active=2", "model.experts.width=1536", "model.width=3200"


@pytest.mark.parametrize(
    ("gpus", "keys"),
    [
        (8, ("model.layers=4",)),
        (8, ("model.layers=11", "parallel.data.mode=ddp")),
        (8, ("model.layers=3", "parallel.dp_replicate=2")),
        (64, ("model.layers=5", "parallel.tp=8")),
        (16, ("model.layers=7", "parallel.tp=2", "parallel.dp_replicate=4")),
        (16, (*EXPERTS, "parallel.dp_replicate=2", "parallel.cp=2", "parallel.ep=8", "model.experts.count=32")),
        (8, (*EXPERTS, "parallel.ep=4", "parallel.data.mode=ddp", "model.experts.count=16")),
        (8, (*EXPERTS, "parallel.tp=2", "parallel.ep=4", "model.experts.count=8")),
        (8, (*EXPERTS, "parallel.dp_replicate=2", "model.experts.count=8")),
        (8, (*EXPERTS, "parallel.dp_replicate=2", "parallel.ep=2", "model.experts.count=6")),
    ],
    ids=["shards", "whole", "replicas", "tp", "replicas, tp", "experts", "ddp", "tp, ep", "fsdp", "uneven"],
)
def test_the_fullest_rank_of_every_exchange_is_waited_for(gpus: int, keys: tuple[str, ...]) -> None:
    """Experts are whole on some ranks, which send more than owners get. What else these send is counted at its most."""
    config = configured(gpus, *WIDE, "model.layers=2", *keys, model="llama3_8b")
    parallel, (matrices,) = config.parallel, muon_matrices(resolve(config))
    layout, shards = parallel.layout, parallel.dp_shard * parallel.cp if parallel.data.sharded else 1
    replicas = layout.world_size // layout.tp // shards
    held = stage_matrices(config.model, range(config.model.layers), replicas, shards, layout.tp, ep=parallel.ep)
    assert [one.matrix.shape for one in matrices] == [matrix.shape for matrix in held]
    plan, expected = MuonPlan(held, 2), [0, 0]
    for bucket in plan.buckets:
        for way, pieces in enumerate((plan.gathered(bucket), plan.returned(bucket))):
            expected[way] += max(map(max, plan._sizes(pieces))) if moves(pieces) else 0
    for found, each in zip(_exchanged(matrices, plan.owners, gpus, 2), expected, strict=True):
        assert 0.998 * each <= found <= (1.05 if config.model.experts is None else 1.25) * each
