"""Who owns which matrix under Muon, which pieces move, and what is predicted from that."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.model_schema import Model
from megalite.plan.muon import Box, Matrix, MuonPlan, boxes, elements, owners, stage_matrices

COSTS = st.lists(st.integers(1, 1000) | st.sampled_from([64, 64, 512]), min_size=1, max_size=40)


def cells(box: Box) -> set[tuple[int, int]]:
    return set(product(*box))


@st.composite
def plans(draw: st.DrawFn) -> MuonPlan:
    mesh = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 3, 2), (2, 5, 1), (1, 2, 3)]))
    matrices = []
    for _ in range(draw(st.integers(1, 8))):
        rows, columns, split = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(0, 1))
        shape = (rows * mesh[2], columns) if split == 0 else (rows, columns * mesh[2])
        matrices.append(Matrix(shape, boxes(shape, mesh, ((2, split), (1, 0)))))
    return MuonPlan(matrices, draw(st.sampled_from([2, 8])), draw(st.sampled_from([0, 500, 5000, 1 << 30])))


@given(COSTS, st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_one_matrix(costs: list[int], ranks: int) -> None:
    found = owners(costs, ranks)
    load = [sum(cost for cost, owner in zip(costs, found, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(load) == sum(costs)
    assert max(load) <= sum(costs) / ranks + max(costs)
    assert min(load) + max(costs) >= max(load)


@given(st.integers(1, 40), st.integers(1, 9))
def test_equal_matrices_are_shared_out_equally(count: int, ranks: int) -> None:
    load = Counter(owners([7] * count, ranks))
    assert max(load.values()) == -(-count // ranks)


@given(plans())
def test_a_bucket_has_every_matrix_once(plan: MuonPlan) -> None:
    assert sorted(index for bucket in plan.buckets for index in bucket) == list(range(len(plan.matrices)))


@given(plans())
def test_owners_gather_every_element_once_and_everybody_gets_his_box(plan: MuonPlan) -> None:
    for index, matrix in enumerate(plan.matrices):
        gathered, returned = plan.gathered([index]), plan.returned([index])
        assert {piece.target for piece in gathered} == {piece.source for piece in returned} == {plan.owners[index]}
        arrived = [cell for piece in gathered for cell in cells(piece.box)]
        assert len(arrived) == len(set(arrived)) == matrix.shape[0] * matrix.shape[1]
        assert all(matrix.boxes[piece.source] == piece.box for piece in gathered)
        assert {piece.target: piece.box for piece in returned} == {
            rank: box for rank, box in enumerate(matrix.boxes) if elements(box)
        }


@given(plans())
def test_what_is_sent_is_received(plan: MuonPlan) -> None:
    assert sum(plan.sent()) == sum(plan.received())
    assert sum(plan.flops()) == sum(matrix.flops for matrix in plan.matrices)
    if plan.ranks == 1:
        assert plan.sent() == [0]


@given(plans())
def test_smaller_buckets_move_as_much(plan: MuonPlan) -> None:
    whole = MuonPlan(plan.matrices, plan.itemsize)
    assert len(whole.buckets) == 1
    assert whole.owners == plan.owners
    assert whole.sent() == plan.sent()


def test_a_bucket_ends_where_its_bytes_do_and_gives_every_rank_work() -> None:
    matrix = Matrix((8, 8), boxes((8, 8), (1, 4, 1), ((1, 0),)))
    for bucket_bytes, rounds in ((0, 1), (2 * 512 + 2 * 512, 1), (2 * 4 * 512 - 1, 1), (2 * 4 * 512, 2), (1 << 20, 3)):
        plan = MuonPlan([matrix] * 12, 8, bucket_bytes)
        assert [len(bucket) for bucket in plan.buckets] == [4 * rounds] * (3 // rounds) + [4] * (3 % rounds)
        for bucket in plan.buckets:
            assert {plan.owners[index] for index in bucket} == {0, 1, 2, 3}


def test_a_replica_of_the_owner_sends() -> None:
    """Two replicas of three shards; the last shard is empty."""
    matrix = Matrix((2, 4), boxes((2, 4), (2, 3, 1), ((1, 0),)))
    plan = MuonPlan([matrix] * 6, 2)
    assert sorted(plan.owners) == list(range(6))
    for index, owner in enumerate(plan.owners):
        assert {piece.source // 3 for piece in plan.gathered([index])} == {owner // 3}


def test_traffic_worked_out_by_hand() -> None:
    """One matrix of 12 elements in 4 parts, owned by rank 0: three parts come, three go, of 3 elements each."""
    plan = MuonPlan([Matrix((4, 3), boxes((4, 3), (1, 4, 1), ((1, 0),)))], 2)
    assert plan.sent() == plan.received() == [18, 6, 6, 6]
    assert plan.flops() == [5 * (2 * 9 * 4 + 2 * 27 + 2 * 9 * 4), 0, 0, 0]


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 4, 2), (1, 16, 4)])
def test_the_matrices_of_a_stage(mesh: tuple[int, int, int]) -> None:
    model = Model(layers=4, width=64, heads=8, kv_heads=4, ffn=96, qkv_bias=True, qk_norm=True, vocab_size=999)
    found = stage_matrices(model, range(1, 3), *mesh)
    head = model.head_size
    layer = [(8 * head, 64), (4 * head, 64), (4 * head, 64), (64, 8 * head), (96, 64), (96, 64), (64, 96)]
    assert [matrix.shape for matrix in found] == layer * 2
    for matrix in found:
        held = Counter(cell for box in matrix.boxes for cell in cells(box))
        assert set(held.values()) == {mesh[0]}
        assert len(held) == matrix.shape[0] * matrix.shape[1]


def test_llama_8b_moves_and_computes_as_published() -> None:
    """Of 64 ranks: 2 bytes in and 2 out per parameter of a rank; 0.33 % of a step of 4 million tokens."""
    model = Model(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab_size=128256, sequence_length=8192)
    matrices = stage_matrices(model, range(32), 1, 64, 1)
    plan = MuonPlan(matrices, 2)
    parameters = sum(rows * columns for rows, columns in (matrix.shape for matrix in matrices))
    assert sum(plan.sent()) == pytest.approx(4 * parameters, rel=1 / 32)
    assert sum(plan.flops()) / (6 * 8.03e9 * 4e6) == pytest.approx(0.0033, rel=0.2)
    assert max(plan.temporaries(4)) < 2 << 30
