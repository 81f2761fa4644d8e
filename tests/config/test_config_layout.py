import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.layout import AXES, VOCABULARY_STEP, Layout, vocabulary_rows

layouts = st.builds(Layout, *[st.integers(1, 4)] * len(AXES))


@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    seen = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(**at) for at in seen] == list(range(layout.world_size))
    assert len({tuple(at.values()) for at in seen}) == layout.world_size


@given(layouts)
def test_ranks_are_in_order_of_coordinates_outermost_first(layout: Layout) -> None:
    seen = [tuple(layout.coordinates(rank)[axis] for axis in AXES) for rank in range(layout.world_size)]
    assert seen == sorted(seen)


def test_order_of_axes() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert layout.coordinates(1) == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert layout.rank(pp=1) == 16
    assert layout.rank(dp_shard=1, tp=1) == 5


@given(layouts)
def test_ranks_that_differ_in_tp_cp_or_pp_read_the_same_samples(layout: Layout) -> None:
    readers: dict[tuple[int, int], set[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        readers.setdefault((at["dp_replicate"], at["dp_shard"]), set()).add(layout.dp_rank(rank))
    assert sorted(next(iter(found)) for found in readers.values()) == list(range(layout.dp))
    assert all(len(found) == 1 for found in readers.values())


@given(st.integers(1, 1 << 20), st.integers(1, 64))
def test_columns_of_the_head_fill_tiles(size: int, tp: int) -> None:
    rows, tokens = vocabulary_rows(size, tp), -(-size // tp)
    assert 0 <= rows - tokens < max(tokens / 8, 1)
    if tokens >= 8 * VOCABULARY_STEP:
        assert rows % VOCABULARY_STEP == 0
    if tokens > 63:
        assert rows % 8 == 0, "16 bytes in bf16"
    assert vocabulary_rows(rows * tp, tp) == rows


@pytest.mark.parametrize(
    ("size", "tp", "rows"),
    [(50_257, 1, 50_304), (50_257, 2, 25_216), (32_000, 8, 4_096), (128_256, 4, 32_128), (256, 2, 128), (97, 2, 52)],
)
def test_rows_of_known_vocabularies(size: int, tp: int, rows: int) -> None:
    assert vocabulary_rows(size, tp) == rows


def test_what_lies_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside"):
        Layout(tp=4).coordinates(4)
    with pytest.raises(ValueError, match="tp=4 is outside"):
        Layout(tp=4).rank(tp=4)
    with pytest.raises(ValueError, match="unknown axis 'ep'"):
        Layout().rank(ep=0)
