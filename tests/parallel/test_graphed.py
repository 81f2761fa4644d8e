"""Steps whose micro-batches are graphs, on a device of a CPU that captures as CUDA does."""

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphed_cases import (
    MODEL,
    assert_equal,
    assert_steps_equal,
    both,
    capturing,
    compared_over_ranks,
    configured,
)
from ranks import Ranks
from recorded_graphs import RecordedGraphs
from torch.distributed.tensor import DTensor
from toy_jobs import advance, make, one_rank, restorer, save

from megalite.base.errors import InputError
from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter
from megalite.config.schema import Rampup
from megalite.parallel.graphed import GRAPHS
from megalite.train.step import evaluate, train_step
from megalite_kernels.collectives import all_gather_single

EIGHTS = replace(MODEL, heads=2, kv_heads=2, ffn=32)  # its sizes fit products in 8 bits


@pytest.fixture
def graphs() -> Iterator[list[RecordedGraphs]]:
    """What the jobs of a test, on one rank, capture one after another."""
    with capturing() as found, one_rank():
        yield found


CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp64": {"precision": "fp64"},
    "fp8": {"precision": "fp8", "model": EIGHTS},
    "tied": {"model": replace(MODEL, tie_embeddings=True)},
    "adapter": {"adapter": Adapter(rank=2)},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
}


@pytest.mark.parametrize("name", CASES)
def test_steps_by_graphs_are_those_without_to_the_last_bit(name: str, graphs: list[RecordedGraphs]) -> None:
    assert_steps_equal(configured(**CASES[name]))
    (captured,) = graphs
    assert len(captured.operations) == 2
    assert captured.replays == 4 * 4  # all micro-batches but those of the first step


GATHER, SCATTER, SUM = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default", "c10d.allreduce_.default"
GATHER_OF_COMPILED = "_c10d_functional.all_gather_into_tensor.default"
SPLIT = replace(MODEL, width=32, kv_heads=4, ffn=32)  # parts of two ranks fit products in 8 bits
OVER_RANKS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp64": {"precision": "fp64"},
    "fp8": {"precision": "fp8", "model": SPLIT},
    "tied, norms over ranks": {"model": replace(MODEL, tie_embeddings=True, qk_norm_width="all")},
    "full recompute, adapter": {"adapter": Adapter(rank=2, dora=True), "recompute": "full"},
    "compiled": {"compile": True},
}


@pytest.mark.parametrize("name", OVER_RANKS)
def test_graphs_over_ranks_hold_their_collectives_but_for_the_sums_of_a_step(name: str, ranks: Ranks) -> None:
    """Gathers and scatters in pieces as well, which are many at once."""
    config = configured(layout=Layout(tp=2), **OVER_RANKS[name])
    first, second = ranks.run(compared_over_ranks, config, 5, 1)[:2]
    assert first == second
    (writing, adding), replays = first
    assert replays == 4 * 4
    assert writing[GATHER] == adding[GATHER] > 0
    assert writing[SCATTER] == adding[SCATTER] > 0
    casts, norms = name == "fp8", "norms" in name or "adapter" in name
    assert (adding[SUM] > 0) == (casts or norms)
    assert (writing[SUM] > adding[SUM]) == casts, "scales of weights, which are cast once a step"
    assert (adding[GATHER_OF_COMPILED] > 0) == (name == "compiled")


def test_graphs_over_ranks_serve_steps_of_more_micro_batches(ranks: Ranks) -> None:
    """Not in pieces, which are more collectives of the same."""
    config = configured(layout=Layout(tp=2))
    samples = 8 * config.model.sequence_length
    rampup = Rampup(start=2, increment=2, tokens=2 * samples)
    grown = replace(config, batch=replace(config.batch, rampup=rampup))
    found = ranks.run(compared_over_ranks, grown, 8, 1 << 40)
    assert found[0] == found[1]
    (whole, _), _ = found[0]
    (in_pieces, _), _ = ranks.run(compared_over_ranks, config, 2, 1)[0]
    assert in_pieces[GATHER] > whole[GATHER]
    assert in_pieces[SCATTER] > whole[SCATTER]


def test_the_device_of_these_tests_finds_collectives_that_a_gpu_would_not_take() -> None:
    x, kept = torch.ones(2), torch.zeros(2)

    def read_early() -> None:
        gathered = torch.empty(2)
        work = all_gather_single(gathered, x, async_op=True)
        kept.copy_(gathered)
        work.wait()

    with one_rank():
        begun = dist.all_reduce(x, async_op=True)
        refused = {
            r"not waited for: \['c10d\.allreduce_": lambda: dist.all_reduce(x, async_op=True),
            "waits for a collective that is not in the graph": lambda: begun.wait(),
            r"c10d\.barrier\.default cannot be in a graph": dist.barrier,
        }
        for told, work in refused.items():
            with pytest.raises(AssertionError, match=told):
                RecordedGraphs().graph_of(work)
        begun.wait()
        RecordedGraphs().graph_of(read_early)()
    assert kept.isnan().all()


def test_evaluations_and_loads_go_beside_graphs(graphs: list[RecordedGraphs], tmp_path: Path) -> None:
    """Evaluations of another micro-batch, too; copies are made anew of weights that were loaded."""
    jobs = both(configured())
    losses = []
    for job, folder in zip(jobs, (tmp_path / "graphed", tmp_path / "plain"), strict=True):
        made = advance(job, 0, 3)
        path = save(job, folder, 3)
        made += advance(job, 3, 5)
        made.append(evaluate(job, [random_batch(job, 9)]))
        restorer(job).all(path)
        losses.append(made + advance(job, 3, 6))
    assert losses[0] == losses[1]
    assert losses[0][3:5] == losses[0][6:8]
    assert_equal(*jobs)


def test_graphs_serve_steps_of_more_micro_batches(graphs: list[RecordedGraphs]) -> None:
    """Captured are those of the second step, and what adds to sums once there are such micro-batches."""
    config = configured()
    samples = 8 * config.model.sequence_length
    rampup = Rampup(start=2, increment=2, tokens=2 * samples)
    jobs = both(replace(config, batch=replace(config.batch, rampup=rampup)))
    counts = [random_batch(jobs[0], step).shape[0] for step in range(8)]
    assert counts[:3] == [1, 1, 1]
    assert counts[-1] == 4
    ours, theirs = (advance(job, 0, 8) for job in jobs)
    assert ours == theirs
    assert_equal(*jobs)
    (captured,) = graphs
    assert len(captured.operations) == 2
    assert captured.replays == sum(counts) - 2


def test_a_step_that_is_skipped_leaves_nothing_in_sums(graphs: list[RecordedGraphs]) -> None:
    jobs = both(configured())
    for job in jobs:
        advance(job, 0, 3)
        scale = next(iter(job.stages.values())).head.norm.weight
        assert isinstance(scale, DTensor)
        kept = scale.to_local().clone()
        with torch.no_grad():
            scale.to_local().fill_(torch.inf)
        assert not isfinite(train_step(job, random_batch(job, 3), 3).read().loss)
        with torch.no_grad():
            scale.to_local().copy_(kept)
    assert advance(jobs[0], 4, 6) == advance(jobs[1], 4, 6)
    assert_equal(*jobs)


def test_micro_batches_are_noted_whether_graphs_run_them_or_not(graphs: list[RecordedGraphs]) -> None:
    """A profile finds no action of a schedule, of which one would be there again and again."""
    job, _ = both(configured())
    expected = [f"micro-batch {number} of 4" for number in (1, 2, 3, 4)]
    for step in range(3):
        notes: list[str] = []
        job.activity.follower = lambda note, notes=notes: notes.append(str(note))
        train_step(job, random_batch(job, step), step)
        assert notes == [*expected, "finishing the gradients", "updating the weights"]


def test_graphs_are_timed_apart_from_passes_of_which_waits_are_known(graphs: list[RecordedGraphs]) -> None:
    job, _ = both(configured())
    sections = []
    with job.clock.running():
        for step in range(3):
            train_step(job, random_batch(job, step), step)
            sections.append(job.clock.stepped().keys())
    assert sections == [{"optimizer"}, *[{GRAPHS, "optimizer"}] * 2]


def test_graphs_take_a_gpu() -> None:
    with (
        one_rank(),
        pytest.raises(InputError, match=r"train\.cuda_graph = true: needs CUDA, and this job is on a CPU; use false"),
    ):
        make(configured())
