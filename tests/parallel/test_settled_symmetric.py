"""Whether GPUs have symmetric memory in common, asked on ranks that have what PyTorch stands in with."""

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from toy_jobs import CPU

from megalite.config.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.parallel import settled_symmetric
from megalite.parallel.settled_symmetric import Place, reason_of_places

HERE = Place("one", 0, "")


def refusal(what: str) -> str:
    """The refusal of two groups of two ranks, of which `what` is wrong with one rank's."""
    mesh = Mesh.build(Layout(tp=2, dp_shard=2), CPU)
    if mesh is None:
        return "outside"
    mine, group = mesh.rank == 3, mesh.group("tp")

    def scattered_wrong(*given: Any) -> Tensor:
        return scattered(*given) + 1

    def gathered_wrong(*given: Any) -> tuple[None, list[Tensor]]:
        return None, [product + 1 for product in gathered(*given)[1]]

    def failing(*given: Any) -> Tensor:
        scattered(*given)
        raise RuntimeError("no peers.\nMore of it.")

    scattered, gathered = settled_symmetric.scattered_product, settled_symmetric.gathered_products
    scatters = {"fails": failing, "scatters wrongly": scattered_wrong}.get(what, scattered) if mine else scattered
    gathers = gathered_wrong if mine and what == "gathers wrongly" else gathered
    lack = "no room" if what == "lacks" and mine else ""
    apart = (what == "is apart" and mine) or (what == "groups are apart" and mesh.rank >= 2)
    symmetric_memory = import_module("torch.distributed._symmetric_memory")
    with (
        patch.object(settled_symmetric, "scattered_product", scatters),
        patch.object(settled_symmetric, "gathered_products", gathers),
        patch.object(settled_symmetric, "_lack", lambda device: settled_symmetric.prepare() or lack),
        patch.object(settled_symmetric.socket, "gethostname", lambda: "two" if apart else "one"),
        patch.object(symmetric_memory, "enable_symm_mem_for_group") as enabled,
    ):
        told = settled_symmetric._refusal(mesh)
    tried = what not in ("lacks", "is apart")
    assert [call.args for call in enabled.call_args_list] == [(group.group_name,)] * tried, "the compiler looks for it"
    return told


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("nothing", ""),
        ("lacks", "no room"),
        ("is apart", "ranks of tensor parallelism are on 2 nodes: one, two"),
        ("fails", "no peers"),
        ("scatters wrongly", "PyTorch's operations on it gave a wrong result"),
        ("gathers wrongly", "PyTorch's operations on it gave a wrong result"),
        ("groups are apart", ""),
    ],
)
def test_all_ranks_refuse_what_one_cannot(what: str, told: str, ranks: Ranks) -> None:
    assert ranks.run(refusal, what)[:4] == [told] * 4


def test_ranks_on_one_host_may_have_memory_in_common() -> None:
    assert reason_of_places([HERE, HERE._replace(number=1)]) == ""
    assert reason_of_places([HERE, HERE._replace(lack="none")]) == "none"


@pytest.mark.parametrize(
    ("numbers", "reads", "told"),
    [
        ((0, 1), True, ""),
        ((0, 1), False, "GPU 0 of one cannot read the memory of GPU 1"),
        ((0, 0), False, ""),  # each rank sees its own alone
        ((0, 2), False, ""),  # it does not see that one
    ],
)
def test_gpus_that_a_rank_sees_are_asked(numbers: tuple[int, int], reads: bool, told: str) -> None:
    places = [HERE._replace(number=number) for number in numbers]
    with (
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(torch.cuda, "can_device_access_peer", lambda here, there: reads),
    ):
        assert settled_symmetric._without_access(places[0], places) == told
