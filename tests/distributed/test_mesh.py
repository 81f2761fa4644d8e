from collections import Counter
from copy import deepcopy
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import SIZE, Ranks
from torch import nn
from torch._inductor.codecache import FxGraphCachePickler
from torch.distributed import distributed_c10d
from torch.fx import Graph, GraphModule
from toy_jobs import one_rank

from megalite.config.layout import AXES, Layout
from megalite.distributed.mesh import EXPERT_AXES, Mesh, connect
from megalite.dry_run.transfers import axes_of

LAYOUTS = [
    Layout(),
    Layout(tp=8),
    Layout(pp=2, dp_replicate=2, tp=2),
    Layout(pp=2, dp_shard=2, tp=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2),
    Layout(pp=4, dp_shard=2),
    Layout(pp=3, tp=2),
]
EXPERT_LAYOUTS = [
    Layout(pp=2, dp_shard=2, tp=2, ep=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2),
    Layout(dp_replicate=2, cp=2, tp=2, ep=4),
    Layout(pp=2, dp_replicate=2, dp_shard=2, ep=2),
    Layout(dp_shard=8, ep=8),
]
Seen = tuple[dict[str, int], int, dict[str, list[int]], list[int], list[int], dict[tuple[str, int], int]]


def look(layout: Layout) -> Seen | None:
    mesh = Mesh.build(layout, torch.device("cpu"))
    if mesh is None:
        return None
    groups = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in ("pp", "dp_replicate", "fsdp", "tp")}
    data = mesh.data.mesh.flatten().tolist()
    along = {(axis, position): mesh.along(axis, position) for axis in AXES for position in range(getattr(layout, axis))}
    return mesh.coordinates, mesh.dp_rank, groups, data, dist.get_process_group_ranks(mesh.world), along


def neighbours(layout: Layout, rank: int, *axes: str) -> list[int]:
    """The ranks that differ from `rank` only along `axes`."""
    at = layout.coordinates(rank)
    choices = [range(getattr(layout, axis)) for axis in axes]
    return [layout.rank(**{**at, **dict(zip(axes, chosen, strict=True))}) for chosen in product(*choices)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_mesh_agrees_with_the_arithmetic_of_the_layout(layout: Layout, ranks: Ranks) -> None:
    told = ranks.run(look, layout)
    assert told[layout.world_size :] == [None] * (SIZE - layout.world_size)
    for rank, (coordinates, dp_rank, groups, data, world, along) in enumerate(told[: layout.world_size]):
        assert coordinates == layout.coordinates(rank)
        assert dp_rank == layout.dp_rank(rank)
        assert world == list(range(layout.world_size))
        assert groups["pp"] == neighbours(layout, rank, "pp")
        assert groups["dp_replicate"] == neighbours(layout, rank, "dp_replicate")
        assert groups["fsdp"] == neighbours(layout, rank, "dp_shard", "cp")
        assert groups["tp"] == neighbours(layout, rank, "tp")
        assert data == neighbours(layout, rank, "dp_replicate", "dp_shard", "cp")
        for (axis, position), other in along.items():
            assert other == neighbours(layout, rank, axis)[position]


def groups_of_experts(layout: Layout, rank: int, sharded: bool) -> list[tuple[int, ...]]:
    """The ranks along every axis of experts that `rank` is on."""
    size = layout.world_size // layout.pp // layout.dp_replicate

    def place(other: int) -> tuple[int, int, int]:
        return other // size, other % size // layout.ep, other % layout.ep

    replica, shard, part = place(rank)
    stage = neighbours(layout, rank, "dp_replicate", "dp_shard", "cp", "tp")
    same = [other for other in stage if place(other)[2] == part]
    replicas = [other for other in same if not sharded or place(other)[1] == shard]
    shards = [other for other in same if place(other)[0] == replica] if sharded else [rank]
    return [tuple(replicas), tuple(shards), tuple(other for other in stage if place(other)[:2] == (replica, shard))]


def experts_of(layout: Layout, sharded: bool) -> tuple[list[tuple[int, ...]], bool]:
    """The ranks of this rank's groups of experts, and whether their pipeline's group is that of all weights."""
    mesh = Mesh.build(layout, torch.device("cpu"), sharded)
    assert mesh is not None
    assert mesh.experts is not None
    groups = [mesh.experts.get_group(axis) for axis in EXPERT_AXES]
    assert {*groups} <= {*mesh.groups}
    return [tuple(dist.get_process_group_ranks(group)) for group in groups], (
        mesh.experts.get_group("pp") == mesh.group("pp")
    )


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicas"])
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
def test_ranks_share_out_experts_inside_of_a_stage(layout: Layout, sharded: bool, ranks: Ranks) -> None:
    for rank, (groups, one_pipeline) in enumerate(ranks.run(experts_of, layout, sharded)):
        assert groups == groups_of_experts(layout, rank, sharded)
        assert one_pipeline


def stage_of(layout: Layout, sharded: bool) -> tuple[list[int], bool] | None:
    """The ranks of the group of a stage, and whether it is a group of another use."""
    mesh = Mesh.build(layout, torch.device("cpu"), sharded, with_stage=True)
    if mesh is None:
        return None
    axes = [mesh.group(axis) for axis in ("dp_replicate", "fsdp", "tp")]
    assert mesh.stage in mesh.groups
    return dist.get_process_group_ranks(mesh.stage), mesh.stage in [mesh.world, *axes]


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicas"])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(pp=2, cp=2), Layout(pp=2, cp=2, tp=2)], ids=str)
def test_a_stage_has_all_ranks_with_the_same_pp(layout: Layout, sharded: bool, ranks: Ranks) -> None:
    told = ranks.run(stage_of, layout, sharded)
    assert told[layout.world_size :] == [None] * (SIZE - layout.world_size)
    for rank, (found, reused) in enumerate(told[: layout.world_size]):
        assert found == neighbours(layout, rank, "dp_replicate", "dp_shard", "cp", "tp")
        split = [layout.dp_replicate, layout.dp_shard * layout.cp] if sharded else [layout.dp * layout.cp]
        assert reused or (layout.pp > 1 and sum(size > 1 for size in (*split, layout.tp)) > 1)


def pairs_of(layout: Layout) -> tuple[dict[int, list[int]], list[list[int]], set[str]] | None:
    """By pipeline rank, the ranks of the group of messages to it; the ranks of all pairs; the axes that they are."""
    mesh = Mesh.build(layout, torch.device("cpu"))
    if mesh is None:
        return None
    others = [position for position in range(layout.pp) if position != mesh.coordinates["pp"]]
    assert {*mesh.pairs} <= {*mesh.groups}
    return (
        {position: dist.get_process_group_ranks(mesh.toward(position)) for position in others},
        [dist.get_process_group_ranks(pair) for pair in mesh.pairs],
        {axes[pair.group_name] for axes in (mesh.axes, axes_of(mesh)) for pair in mesh.pairs},
    )


@pytest.mark.parametrize("layout", [*(Layout(pp=p) for p in range(1, 6)), Layout(pp=4, tp=2)], ids=str)
def test_messages_to_a_neighbour_have_a_group_of_the_two(layout: Layout, ranks: Ranks) -> None:
    """The first and the last pipeline rank are neighbours too, and of two ranks the pipeline's group is that pair."""
    for rank, told in enumerate(ranks.run(pairs_of, layout)[: layout.world_size]):
        assert told is not None
        toward, pairs, axes = told
        at, line = layout.coordinates(rank)["pp"], neighbours(layout, rank, "pp")
        beside = {(at + 1) % layout.pp, (at - 1) % layout.pp}
        for position, group in toward.items():
            assert group == (sorted([rank, line[position]]) if position in beside else line)
        expected = sorted(sorted([rank, line[position]]) for position in beside) if layout.pp > 2 else []
        assert sorted(pairs) == expected
        assert axes == ({"pp"} if expected else set())


def bounds(layout: Layout, backend: str) -> dict[str, int | None]:
    """By description of a group that building a mesh makes: the multiprocessors that NCCL's kernels may take of it."""
    make, found = dist.new_subgroups_by_enumeration, dict[str, int | None]()

    def noted(rows: list[list[int]], **options: Any) -> Any:
        given = options.pop("pg_options", None)
        found[options["group_desc"]] = given and given.config.max_ctas
        assert (given is None) == ("timeout" not in options)
        assert given is None or options.pop("timeout") == given._timeout
        return make(rows, **options)

    nccl = SimpleNamespace(
        Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None), _timeout=timedelta(minutes=10))
    )
    with (
        patch.object(dist, "new_subgroups_by_enumeration", noted),
        patch.object(dist, "get_backend_config", lambda: backend),
        patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        Mesh.build.__wrapped__(layout, torch.device("cpu"))  # not the one that tests share
    return found


def test_messages_of_pipelines_take_few_multiprocessors_from_compute_over_nccl(ranks: Ranks) -> None:
    for layout, bounded in (
        (Layout(pp=2, dp_replicate=2, dp_shard=2), {"mesh_pp": 8}),
        (Layout(pp=4, dp_shard=2), {"mesh_pp": 8, "pp_even": 4, "pp_odd": 4}),
        (Layout(pp=3, dp_replicate=2), {"mesh_pp": 8, "pp_even": 4, "pp_odd": 4, "pp_ends": 4}),
    ):
        for told in ranks.run(bounds, layout, "cpu:gloo,cuda:nccl"):
            assert {name: most for name, most in told.items() if most is not None} == bounded
        for told in ranks.run(bounds, layout, "cpu:gloo,cuda:gloo"):
            assert {*told.values()} == {None}


def test_nobody_asked_for_the_group_of_a_stage(ranks: Ranks) -> None:
    assert ranks.run(has_stage, Layout(pp=2, dp_shard=2, tp=2)) == [False] * SIZE


def has_stage(layout: Layout) -> bool:
    mesh = Mesh.build(layout, torch.device("cpu"))
    return mesh is not None and mesh.stage is not None


def timeouts(layout: Layout, timeout: timedelta) -> set[timedelta] | None:
    """Of the groups of a mesh over which the ranks have met."""
    mesh = Mesh.build(layout, torch.device("cpu"), timeout=timeout)
    if mesh is None:
        return None
    connect(mesh.groups, mesh.device)
    return {group._get_backend(mesh.device).options._timeout for group in mesh.groups}


@pytest.mark.parametrize("layout", [Layout(pp=2, cp=2, tp=2), Layout(pp=3, tp=2)], ids=str)
def test_ranks_meet_over_every_group_and_wait_as_long_as_they_are_told(layout: Layout, ranks: Ranks) -> None:
    patience = timedelta(seconds=55)
    told = ranks.run(timeouts, layout, patience)
    assert told == [{patience}] * layout.world_size + [None] * (SIZE - layout.world_size)


def made_groups(layout: Layout, sharded: bool) -> list[tuple[int, ...]]:
    """The ranks of each of this rank's groups: that of all processes, and those that building a mesh makes."""
    found, make = [tuple(range(dist.get_world_size()))], distributed_c10d.new_group

    def noted(ranks: list[int], *args: Any, **options: Any) -> Any:
        found.extend([tuple(ranks)] * (dist.get_rank() in ranks))
        return make(ranks, *args, **options)

    with patch.object(distributed_c10d, "new_group", noted), patch.object(dist, "new_group", noted):
        Mesh.build.__wrapped__(layout, torch.device("cpu"), sharded, with_stage=True)  # not the one that tests share
    return found


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicas"])
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, Layout(pp=2, cp=2, tp=2), Layout(cp=8), Layout(pp=8), *EXPERT_LAYOUTS], ids=str
)
def test_no_two_groups_have_the_same_ranks_but_those_of_contexts_and_experts(
    layout: Layout, sharded: bool, ranks: Ranks
) -> None:
    for rank, made in enumerate(ranks.run(made_groups, layout, sharded)):
        apart = [tuple(neighbours(layout, rank, "cp"))] if layout.cp > 1 else []
        if layout.ep > 1:
            apart += [group for group in groups_of_experts(layout, rank, sharded) if len(group) > 1]
        assert not Counter(made) - Counter({*made}) - Counter(apart)
        assert made[len(made) - len(apart) :] == apart


def test_a_mesh_has_one_key_in_the_cache_of_compiled_graphs() -> None:
    """Though each process has another hash of it. Later starts then find graphs with DTensors among their inputs."""
    pickler = FxGraphCachePickler(GraphModule(nn.Module(), Graph()))
    with one_rank():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        keys, tp = [], mesh.tp
        for of_this_process in (1, 2):
            tp._hash = of_this_process
            assert hash(tp) == of_this_process
            keys.append(pickler.get_hash(tp))
        assert keys[0] == keys[1]
        assert hash(deepcopy(tp)) != of_this_process, "it is made anew"
        assert deepcopy(tp) == tp
