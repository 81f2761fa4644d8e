"""What the tests of rotary positions have in common."""

from collections.abc import Callable
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DTYPES

from megalite_kernels.rope import Layout

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def heads_of_any_shape(test: Callable[..., None]) -> Callable[..., None]:
    """Runs `test(shape, dtype, layout)` with drawn heads `[s, b, h, e]`."""
    shapes = st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 9), st.integers(1, 20).map(lambda n: 2 * n))
    return settings(max_examples=20)(
        given(shape=shapes, dtype=st.sampled_from(DTYPES), layout=st.sampled_from(LAYOUTS))(test)
    )
