"""Transfers that a step of the real code makes, counted on one rank, beside the predicted ones."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from toy_jobs import CPU
from traffic_cases import (
    BLOCKS,
    CASES,
    FP32,
    FULL,
    KEYS,
    LATENT,
    MUON,
    NORMED,
    POST,
    TIED,
    TP,
    Overrides,
    configured,
    data,
    pipeline,
)

from megalite.config.schema import Config
from megalite.data.loader import Micros
from megalite.dry_run.configuration import as_counted, busiest_rank
from megalite.dry_run.run import dry_run, fake_world
from megalite.dry_run.transfers import CountedTransfers, axes_of, with_world_apart
from megalite.parallel.product import Plain
from megalite.plan.parts import pieces
from megalite.plan.parts.transfers import Transfer, axis_sizes
from megalite.plan.pipeline import micro_batches
from megalite.plan.resolved import resolve
from megalite.plan.traffic.step import step_traffic
from megalite.train.build import Job, build, build_mesh
from megalite.train.step import train_step
from megalite_kernels.collectives import all_gather_single, reduce_scatter_single

ANOTHER = Plain()
SUM = Transfer("all_reduce", "world", 4, "float32")


@contextmanager
def job_of(config: Config, rank: int) -> Iterator[Job]:
    """The job of one rank without the others. Its tensors have data, which is several times as fast as fake ones."""
    with fake_world(rank, config.parallel.layout.world_size):
        mesh = build_mesh(config, CPU)
        assert mesh is not None
        yield build(resolve(config), with_world_apart(mesh))


def counted(job: Job) -> Counter[Transfer]:
    """The transfers of a step."""
    config = job.config
    shape = micro_batches(config), config.batch.micro_size, config.model.sequence_length + 1
    with CountedTransfers(axes_of(job.mesh)) as found:
        train_step(job, Micros.cut_at(torch.zeros(shape, dtype=torch.int64), None), 0)
    return found.found


def predicted(config: Config, rank: int, m: int | None = None) -> Counter[Transfer]:
    found: Counter[Transfer] = Counter()
    for traffic in step_traffic(resolve(config), rank, m or micro_batches(config)):
        found[traffic.transfer] += traffic.times
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_is_counted(name: str) -> None:
    overrides, coordinates = CASES[name]
    config = as_counted(configured(overrides))
    rank = config.parallel.layout.rank(**coordinates)
    with job_of(config, rank) as job:
        assert predicted(config, rank) == counted(job)
        sizes = {axis: job.mesh.group(axis).size() for axis in ("tp", "fsdp", "dp_replicate", "pp")}
    assert sizes.items() <= axis_sizes(config).items()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gathers_of_inputs_in_8_bits_are_predicted(recipe: str) -> None:
    """What ranks reduce to find scales together, at most a number for a row or a column, is not."""
    config = as_counted(configured({**BLOCKS, **TP, "train.float8_recipe": recipe, **data("zero1", dp_shard=2)}))
    with job_of(config, 0) as job:
        found, expected = (
            {each: times for each, times in every.items() if (each.kind, each.axis) == ("all_gather", "tp")}
            for every in (counted(job), predicted(config, 0))
        )
    assert found == expected
    assert any(each.dtype == "uint8" for each in found)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_a_step_leaves_nothing_behind_for_the_next(mode: str) -> None:
    config = as_counted(configured({**TIED, **MUON, **pipeline("zb_h1"), **data(mode, dp_shard=2)}))
    with job_of(config, 2) as job:
        assert counted(job) == counted(job) == predicted(config, 2)


def test_a_whole_backward_between_the_halves_of_another(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("name: a\nmicro_batches: 3\nplacement: [0]\nranks: [F0.0 F0.1 F0.2 I0.0 B0.1 W0.0 B0.2]\n")
    mixed = {"parallel.pipeline.schedule": path, "batch.global": 6, **TP, **data("zero3", dp_shard=2)}
    config = as_counted(configured(mixed))
    with job_of(config, 0) as job:
        assert predicted(config, 0) == counted(job)


@pytest.mark.parametrize(
    "overrides",
    [{**FP32, **data("ddp", dp_shard=2)}, data("zero3", dp_shard=2), pipeline("zb_h1")],
    ids=["without fsdp", "zero3", "split"],
)
def test_gradients_of_weights_that_tp_does_not_split_are_summed_once_a_step(overrides: Overrides) -> None:
    config = as_counted(configured({**TP, **NORMED, **overrides}, steps=4))
    with job_of(config, 0) as job:
        found = counted(job)
    assert [times for each, times in found.items() if (each.kind, each.axis) == ("all_reduce", "tp")] == [1]


@pytest.mark.parametrize("overlap", ["symmetric", "auto"])
@pytest.mark.parametrize("overrides", [FULL, {**pipeline("zb_h1"), **NORMED}, LATENT], ids=["full", "split", "latent"])
def test_collectives_that_are_fused_with_products_are_predicted(
    overrides: Overrides, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, however small pieces may be."""
    monkeypatch.setattr(pieces, "MIN_PIECE_BYTES", 1)
    asked = {"parallel.tensor.overlap": overlap}
    config = as_counted(configured({**TP, **asked, **data("zero2", dp_shard=2), **overrides}))
    with job_of(config, 0) as job:
        assert job.fused.used
        assert counted(job) == predicted(config, 0)


@pytest.mark.parametrize(
    "overrides",
    [FULL, {**FULL, **POST}, {**pipeline("zb_h1"), **NORMED}, {"train.product": f"{__name__}:ANOTHER"}, LATENT, KEYS],
    ids=["full recompute", "norms after", "split", "another product", "latent", "latent of keys"],
)
def test_collectives_in_pieces_are_predicted(overrides: Overrides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MIN_PIECE_BYTES", 1)
    config = as_counted(configured({**TP, **data("zero2", dp_shard=2), **overrides}))
    with job_of(config, 0) as job:
        found = counted(job)
    assert found == predicted(config, 0)
    piece = Transfer("all_gather", "tp", 64 * 64 * 2 // 4, "bfloat16")
    assert (piece in found) == ("train.product" not in overrides)


def test_a_dry_run_counts_the_step_that_it_runs() -> None:
    config = configured({**TP, **pipeline("1f1b"), **data("zero1", dp_shard=2), "batch.global": 16})
    found = dry_run(config, 1)
    assert found.micro_batches < 8
    assert found.transfers == predicted(as_counted(config), busiest_rank(config, 1), found.micro_batches)


def test_every_way_to_communicate_is_counted_once() -> None:
    """As real tensors and DTensor, FSDP2 and this program do it; what sends nothing is not counted."""
    with fake_world(0, 4):
        x, whole = torch.zeros(3), torch.zeros(12)
        with CountedTransfers({dist.group.WORLD.group_name: "world"}) as found:
            dist.broadcast(x, 0)
            all_gather_single(whole, x)
            reduce_scatter_single(x, whole)
            dist.all_to_all_single(torch.zeros(2), torch.zeros(5), [1, 1, 0, 0], [2, 1, 1, 1])
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1)]):
                work.wait()
            x + x
    sizes = {"broadcast": 12, "all_gather": 48, "reduce_scatter": 48, "all_to_all": 20, "send": 12, "receive": 12}
    assert found.found == Counter(Transfer(kind, "world", size, "float32") for kind, size in sizes.items())


def test_what_is_not_known_is_refused() -> None:
    with fake_world(0, 4):
        group = dist.new_group([0, 1])
        with CountedTransfers({dist.group.WORLD.group_name: "world"}) as found:
            dist.all_reduce(torch.zeros(1))
            with pytest.raises(RuntimeError, match="group that is no axis"):
                dist.all_reduce(torch.zeros(1), group=group)
            with pytest.raises(RuntimeError, match="c10d::barrier is a collective that nobody counts yet"):
                dist.barrier()
    assert found.found == Counter([SUM])
