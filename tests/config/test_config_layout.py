import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.layout import AXES, Layout

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


def test_what_lies_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside"):
        Layout(tp=4).coordinates(4)
    with pytest.raises(ValueError, match="tp=4 is outside"):
        Layout(tp=4).rank(tp=4)
    with pytest.raises(ValueError, match="unknown axis 'ep'"):
        Layout().rank(ep=0)
