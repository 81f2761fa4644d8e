"""Types of arguments: what they take, and what they say of the rest."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from megalite_launch.base.arguments import above_zero, byte_size, whole


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (whole(1, 65_536), "65536", 65_536),
        (above_zero(), "2.5", 2.5),
        (above_zero(most=1e40), "1e30", 1e30),
        (byte_size, "350GiB", 350 * 2**30),
        (byte_size, "5gb", 5 * 10**9),
        (byte_size, "1.5 kB", 1500),
        (byte_size, "4096", 4096),
        (byte_size, "2T", 2 * 10**12),
    ],
)
def test_values_are_read(read: Callable[[str], Any], text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts", "told"),
    [
        (whole(1, 65_536), ("0", "65537", "-1", "x", "¹", "", "9" * 5000), "must be a whole number from 1 to 65,536"),
        (above_zero(), ("0", "-1", "nan", "inf", "1e19", "x", ""), "must be a number above 0"),
        (above_zero("a number of GiB above 0, as in 70"), ("x",), "must be a number of GiB above 0, as in 70"),
        (byte_size, ("0", "big", "-1", "1e9", "9999P", "1 k i B", ""), "must be a size above 0, as 350GiB, 20GB or"),
    ],
)
def test_others_are_refused_with_the_rule(read: Callable[[str], Any], texts: tuple[str, ...], told: str) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError) as refused:
            read(text)
        assert told in str(refused.value)
        assert len(str(refused.value)) < 120
