"""Muon over shards is, to the last bit, Muon over whole matrices."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from muon_cases import BAD, CLIP, STEPS, Held, alone, gradients_of, refused, stepped, trained, weights_of
from ranks import SIZE, Ranks
from torch import Tensor, nn

from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import DataParallel, Parallel, Pipeline
from megalite.config.schema import Batch, Config, Optim, Place, Train
from megalite.optim.muon import Muon
from megalite.plan.muon import BUCKET_BYTES, MuonPlan, boxes, elements, matrices_of, moves, stage_matrices
from megalite.plan.pipeline import table_of
from megalite.plan.split import layers_of, split_of
from megalite.plan.state_streams import DEVICE_SLOTS, padded
from megalite_kernels.backend import Backend

# Of a rank of tp: as few rows as one, fewer and more than there are shards, and none that 8 divides.
BASE = [(3, 5), (1, 7), (7, 1), (1, 1), (11, 2), (5, 20), (9, 9), (2, 13), (20, 3), (6, 6)]
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=8),
    Layout(dp_shard=2),
    Layout(dp_shard=8),
    Layout(dp_shard=4, tp=2),
    Layout(dp_replicate=2, dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2, tp=2),
    Layout(dp_replicate=8),
    Layout(dp_shard=2, cp=2, tp=2),
    Layout(pp=2, dp_shard=2, tp=2),
    Layout(pp=2, dp_replicate=2, cp=2),
    Layout(pp=2, tp=4),
    Layout(pp=8),
]
Case = tuple[list[tuple[int, ...]], list[int]]  # shapes, and which dimension tp splits


def case(tp: int) -> Case:
    """Every second matrix is split by columns."""
    splits = [number % 2 for number in range(len(BASE))]
    shapes: list[tuple[int, ...]] = [
        (rows, columns * tp) if split else (rows * tp, columns)
        for (rows, columns), split in zip(BASE, splits, strict=True)
    ]
    return shapes, splits


def mesh_of(layout: Layout, sharded: bool = True) -> tuple[int, int, int]:
    replicas, shards = layout.dp_replicate, layout.dp_shard * layout.cp
    return (replicas, shards, layout.tp) if sharded else (replicas * shards, 1, layout.tp)


def plan_of(layout: Layout, sharded: bool, given: Case, bucket_bytes: int) -> MuonPlan:
    mesh = mesh_of(layout, sharded)
    matrices = [
        matrix
        for shape, split in zip(*given, strict=True)
        for matrix in matrices_of(shape, boxes(shape, mesh, ((2, split), (1, 0))))
    ]
    return MuonPlan(matrices, 8, bucket_bytes)


def on_one(shapes: Sequence[tuple[int, ...]], pp: int, backend: Backend) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and momentum of the same steps on whole matrices, without the one that is skipped."""
    params = [nn.Parameter(weight) for weight in weights_of(shapes, pp)]
    optimizer = Muon(params, lr=0.02, weight_decay=0.3, backend=backend)
    for step in (step for step in range(STEPS) if step != BAD):
        for param, grad in zip(params, gradients_of(shapes, pp, step), strict=True):
            param.grad = grad * CLIP
        optimizer.step()
    return [param.detach() for param in params], [optimizer.state[param]["momentum_buffer"] for param in params]


def check(
    layout: Layout,
    sharded: bool,
    bucket_bytes: int,
    ranks: Ranks,
    given: Case | None = None,
    place: Place = "device",
    backend: Backend = "auto",
) -> list[Held]:
    shapes, splits = given or case(layout.tp)
    told = ranks.run(stepped, layout, sharded, shapes, splits, bucket_bytes, place, backend)
    assert told[layout.world_size :] == [None] * (SIZE - layout.world_size)
    plan = plan_of(layout, sharded, (shapes, splits), bucket_bytes)
    for pp in range(layout.pp):
        weights, momenta = on_one(shapes, pp, backend)
        size = layout.world_size // layout.pp
        for position, held in enumerate(told[pp * size : (pp + 1) * size]):
            assert held.misplaced == []
            pairs = zip(shapes, held.boxes, strict=True)
            of_matrices = [matrix.boxes for shape, boxes in pairs for matrix in matrices_of(shape, boxes)]
            assert of_matrices == [matrix.boxes for matrix in plan.matrices]
            for expected, found in ((weights, held.weights), (momenta, held.momenta)):
                for whole, part in zip(expected, found, strict=True):
                    assert torch.equal(whole[part.box], part.values), f"{tuple(whole.shape)} on rank {position}"
            assert (held.sent, held.received) == (plan.sent()[position], plan.received()[position])
    return told[: layout.world_size]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_is_bitwise_one_process(layout: Layout, ranks: Ranks) -> None:
    check(layout, True, BUCKET_BYTES, ranks)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2), Layout(dp_shard=8), Layout(dp_shard=4, tp=2), Layout(pp=2, dp_replicate=2, tp=2)],
    ids=str,
)
def test_stacks_are_bitwise_one_process_in_every_layout(layout: Layout, ranks: Ranks) -> None:
    """Shards of a stack have whole matrices, or none."""
    tp = layout.tp
    stacks: Case = [(3, 4 * tp, 5), (6, 6), (8, 3, 6 * tp), (2, 2, 2 * tp, 3)], [1, 0, 2, 2]
    check(layout, True, BUCKET_BYTES, ranks, stacks)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, dp_shard=2, tp=2), Layout(dp_shard=8)], ids=str)
def test_kernels_are_bitwise_one_process(layout: Layout, place: Place, ranks: Ranks) -> None:
    """In Triton's interpreter, with matrices and a stack in one launch or, on the host, one by one."""
    shapes, splits = case(layout.tp)
    given = [*shapes, (3, 4 * layout.tp, 5)], [*splits, 1]
    check(layout, True, BUCKET_BYTES, ranks, given, place, "triton")


@pytest.mark.parametrize("layout", [Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2, tp=2)], ids=str)
def test_what_is_not_sharded_is_bitwise_one_process(layout: Layout, ranks: Ranks) -> None:
    for held in check(layout, False, BUCKET_BYTES, ranks):
        assert held.exchanges == (2 if layout.tp > 1 else 1), "owners have what they need where nothing is sharded"


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2)], ids=str)
@pytest.mark.parametrize("bucket_bytes", [0, 4_000], ids=["smallest", "middle"])
def test_buckets_change_no_bit(layout: Layout, bucket_bytes: int, ranks: Ranks) -> None:
    plan = plan_of(layout, True, case(layout.tp), bucket_bytes)
    assert len(plan.buckets) > 1
    needed = [moves(pieces(bucket)) for bucket in plan.buckets for pieces in (plan.gathered, plan.returned)]
    assert {held.exchanges for held in check(layout, True, bucket_bytes, ranks)} == {sum(needed)}


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_replicate=4), Layout(dp_shard=2, tp=2)], ids=str)
@pytest.mark.parametrize(
    ("bucket_bytes", "place"),
    [(0, "device"), (600_000, "device"), (BUCKET_BYTES, "device"), (0, "host"), (BUCKET_BYTES, "host")],
    ids=["smallest", "middle", "one", "smallest, host", "one, host"],
)
def test_temporaries_are_predicted(layout: Layout, bucket_bytes: int, place: Place, ranks: Ranks) -> None:
    """Large enough that a few bytes of numbers do not matter."""
    shapes: list[tuple[int, ...]] = [(64, 64), (32, 160), (160, 32), (64, 64), (96, 48), (48, 96), (128, 64), (64, 128)]
    if place == "host":  # thin ones: the momentum counts, not the products
        shapes = [(8, 800), (800, 8)] * 4
    splits = [0, 1] * 4
    told = ranks.run(stepped, layout, True, shapes, splits, bucket_bytes, place)
    plan = plan_of(layout, True, (shapes, splits), bucket_bytes)
    for rank, held in enumerate(told[: layout.world_size]):
        slot = padded(8 * max(elements(matrix.boxes[rank]) for matrix in plan.matrices))
        slots = DEVICE_SLOTS * slot if place == "host" else 0
        assert held.temporaries == pytest.approx(plan.temporaries(8)[rank] + slots, rel=1e-4)


def test_parameters_of_other_ranks_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(refused, Layout(dp_shard=4, tp=2)):
        assert "shape (8, 4)" in message
        assert "is not on the stage's ranks" in message


MODEL = Model(
    4,
    16,
    4,
    2,
    ffn=24,
    vocab_size=40,
    sequence_length=8,
    qk_norm=True,
    qkv_bias=True,
    head_width=6,
    tie_embeddings=True,
)
JOBS = {
    "tp": Parallel(dp_shard=1, tp=2),
    "fsdp": Parallel(dp_shard=4),
    "hsdp, zero3": Parallel(dp_replicate=2, dp_shard=2, tp=2, data=DataParallel("zero3")),
    "ddp": Parallel(dp_shard=4, data=DataParallel("ddp")),
    "cp": Parallel(dp_shard=2, cp=2, tp=2),
    "pp": Parallel(pp=2, dp_shard=2, tp=2),
    "pp without layers at the ends": Parallel(pp=4, dp_shard=2, pipeline=Pipeline("1f1b", split=[0, 2, 2, 0])),
    "both ends on one rank": Parallel(pp=2, dp_shard=2, pipeline=Pipeline("dualpipev")),
}


def job_in(parallel: Parallel) -> Config:
    train, optim = Train(steps=5, precision="fp64"), Optim("muon", lr=0.01)
    return Config(model=MODEL, parallel=parallel, batch=Batch(1, 8), train=train, optim=optim)


@pytest.mark.parametrize("name", JOBS)
def test_training_is_that_of_one_process(name: str, ranks: Ranks) -> None:
    config = job_in(JOBS[name])
    layout = config.parallel.layout
    expected = ranks.run(trained, alone(config))[0]
    told = ranks.run(trained, config)[: layout.world_size]
    wholes = {name: part.values for name, part in expected.weights}
    losses = [sum(losses) for losses in zip(*(found.losses for found in told), strict=True)]
    placement, stages = table_of(config).placement, layers_of(split_of(config))
    for rank, found in enumerate(told):
        assert found.losses == pytest.approx(expected.losses, rel=1e-11), losses
        for weight, part in found.weights:
            torch.testing.assert_close(part.values, wholes[weight][part.box], rtol=0, atol=1e-10, msg=weight)
        own = [stage for stage, owner in enumerate(placement) if owner == layout.coordinates(rank)["pp"]]
        mesh = mesh_of(layout, config.parallel.data.sharded)
        predicted = [matrix.boxes for stage in own for matrix in stage_matrices(MODEL, stages[stage], *mesh)]
        assert found.boxes == predicted


ON_HOST = {
    "ddp": Parallel(dp_shard=4, data=DataParallel("ddp")),
    "zero1": Parallel(dp_shard=2, data=DataParallel("zero1")),
    "zero3, tp": Parallel(dp_shard=2, tp=2, data=DataParallel("zero3")),
    "pp, tp": Parallel(pp=2, tp=2, dp_shard=1),
}


@pytest.mark.parametrize("name", ON_HOST)
def test_momentum_on_the_host_changes_no_bit(name: str, ranks: Ranks) -> None:
    config = job_in(ON_HOST[name])
    expected = ranks.run(trained, config)
    found = ranks.run(trained, replace(config, optim=replace(config.optim, placement="host")))
    assert sum(each is not None for each in found) == config.parallel.layout.world_size
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.losses == other.losses
            for (weight, mine), (_, its) in zip(one.weights, other.weights, strict=True):
                assert torch.equal(mine.values, its.values), weight
