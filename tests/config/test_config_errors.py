"""Words for messages."""

import pytest

from megalite.base.errors import InputError, number_ranges


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([], ""), ([7], "7"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 8], "0, 2-3, 8"), (range(5, 5), ""), (range(2), "0-1")],
)
def test_neighbours_are_joined(numbers: list[int], expected: str) -> None:
    assert number_ranges(numbers) == expected


def test_a_message_cannot_disturb_a_terminal() -> None:
    assert str(InputError("a\x1b[31m.txt: é\n  \udcff")) == "a\\x1b[31m.txt: é\n  \\udcff"


def test_a_number_may_stand_for_several() -> None:
    assert number_ranges([0, 1, 3], each=4) == "0-7, 12-15"
