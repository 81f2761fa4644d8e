"""What commands print for people."""

from hypothesis import given
from hypothesis import strategies as st

from megalite.terminal import gib_above

GIB = 1 << 30


@given(st.integers(1, 1 << 50))
def test_the_gib_that_are_asked_for_are_enough_and_hardly_more(size: int) -> None:
    told = gib_above(size)
    assert size <= round(float(told) * GIB)
    assert float(told) * GIB <= 1.0101 * size
    assert len(told.replace(".", "").strip("0").partition("e")[0]) <= 3
