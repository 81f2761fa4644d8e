"""Times of kernels and collectives: what holds of them whatever the constants are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.planner.constants import FITTED
from megalite.planner.hardware import Level, Link, known_clusters, load_cluster
from megalite.planner.kernels import Kernels
from megalite.planner.network import Group, Net

H100 = load_cluster("h100_sxm")
KERNELS = Kernels(H100.gpu)
SIZES = st.integers(1, 2048).map(lambda number: 8 * number)


@given(SIZES, SIZES, SIZES, st.sampled_from(known_clusters()))
def test_no_product_is_faster_than_the_gpu_can_be(m: int, n: int, k: int, name: str) -> None:
    gpu = load_cluster(name).gpu
    time = Kernels(gpu).matmul(m, n, k)
    assert time >= 2 * m * n * k / gpu.peak["bf16"]
    assert time >= 2 * (m * k + k * n + m * n) / gpu.bandwidth


@given(SIZES, SIZES, SIZES, st.integers(1, 4))
def test_more_work_takes_no_less_time(m: int, n: int, k: int, times: int) -> None:
    time = KERNELS.matmul(m, n, k)
    assert KERNELS.matmul(m * times, n, k) >= time
    assert KERNELS.matmul(m, n * times, k) >= time
    assert KERNELS.matmul(m, n, k * times) >= time
    assert KERNELS.matmul(m, n, k, batch=times) >= time


def test_large_products_run_at_the_rate_that_clocks_allow() -> None:
    size = 16384
    rate = 2 * size**3 / KERNELS.matmul(size, size, size)
    assert 0.9 * KERNELS.rate("bf16") < rate <= KERNELS.rate("bf16")
    assert KERNELS.rate("bf16") < H100.gpu.measured["bf16"]


def test_a_card_with_less_power_is_slower() -> None:
    weaker = Kernels(replace(H100.gpu, power=500.0))
    assert weaker.rate("bf16") < KERNELS.rate("bf16")


def test_sizes_that_cannot_be_loaded_in_vectors_take_longer() -> None:
    assert KERNELS.matmul(4096, 4096, 4095) > 1.5 * KERNELS.matmul(4096, 4096, 4096)


NET = Net(H100)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group(8, 1), 361.4e9 * FITTED.node),  # in a node
        (Group(2, 4), 361.4e9 * FITTED.node),
        (Group(16, 8), 50e9 * FITTED.network),  # a rank of every node
        (Group(16, 4), 2 * 50e9 * FITTED.network),  # two ranks of every node, each with an adapter
        (Group(64, 1), min(361.4e9 * FITTED.node, 8 * 50e9 * FITTED.network)),
    ],
)
def test_a_group_runs_at_the_rate_of_what_it_spans(group: Group, expected: float) -> None:
    assert NET.bandwidth(group) == pytest.approx(expected)


def test_boards_in_a_node_are_crossed_by_as_many_lanes_as_they_have_members() -> None:
    boards = replace(H100, levels=(Level(4, Link(300e9, 7e-6)), Level(8, Link(25e9, 7e-6))))
    assert Net(boards).bandwidth(Group(4, 1)) == pytest.approx(0.8 * 300e9 * FITTED.node)
    assert Net(boards).bandwidth(Group(8, 1)) == pytest.approx(4 * 0.8 * 25e9 * FITTED.node)
    assert Net(boards).bandwidth(Group(2, 4)) == pytest.approx(0.8 * 25e9 * FITTED.node)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    group = Group(8, 1)
    parts = sum(NET.collective(kind, 1e8, group) for kind in ("all_gather", "reduce_scatter"))  # type: ignore[arg-type]
    assert NET.collective("all_reduce", 1e8, group) == pytest.approx(parts)
    assert NET.collective("all_reduce", 1e8, Group(1, 1)) == 0


@given(st.integers(2, 2048), st.integers(1, 64), st.floats(1, 1e12))
def test_collectives_take_longer_for_more_bytes_and_more_ranks_of_a_ring(size: int, stride: int, whole: float) -> None:
    group = Group(size, stride)
    time = NET.collective("all_gather", whole, group)
    assert time > 0
    assert NET.collective("all_gather", 2 * whole, group) >= time
