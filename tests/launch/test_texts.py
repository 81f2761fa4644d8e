"""Times, numbers and tables as people read them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite_launch.base.texts import (
    BINARY_UNITS,
    MIN_WIDTH,
    counted,
    lasting,
    markdown_table,
    memory_text,
    printable,
    record_text,
    scaled,
    seconds_text,
    table,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (2.5, "2.5 s"), (59.97, "1 min"), (200, "3 min 20 s"), (3599.7, "1 h"), (5400, "1 h 30 min"),
     (86_399, "1 d"), (273_600, "3 d 4 h"), (40_000_000, "462 d 23 h")],
)  # fmt: skip
def test_times(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0003125, "312 µs"), (0.3125, "312 ms"), (1.5, "1.50 s"), (123.456, "123 s"), (1100, "18.3 minutes")],
)
def test_times_in_one_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@given(st.floats(0, 1e9))
def test_every_time_has_a_text(seconds: float) -> None:
    assert lasting(seconds)


def test_texts_are_made_printable() -> None:
    assert printable("a\x1b]0;title\x07\u202eb\nc\td") == r"a\x1b]0;title\x07\u202eb\nc    d"
    assert printable("x" * 50, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 B"), (0.5, "0.500 B"), (999.4, "999 B"), (999.9, "1.00 kB"), (999.7e3, "1.00 MB"), (4.26e7, "42.6 MB"),
     (3.12e14, "312 TB"), (7, "7 B")],
)  # fmt: skip
def test_numbers_get_a_unit_that_fits(value: float, text: str) -> None:
    assert scaled(value, "B") == text


def test_bytes_and_counts() -> None:
    assert scaled(3 * 2**29, "B", BINARY_UNITS) == "1.50 GiB"
    assert memory_text(3 * 2**29 + 0.4) == "1.50 GiB"
    assert (counted(1, "node"), counted(2000, "node"), counted(2, "box", "boxes")) == (
        "1 node",
        "2,000 nodes",
        "2 boxes",
    )


def test_a_cell_of_markdown_ends_no_column() -> None:
    assert markdown_table(["a", "b"], [["x|y", "two\nlines"]]) == "| a | b |\n| --- | --- |\n| x/y | two lines |\n"


def test_a_table_is_aligned_and_its_last_column_wrapped() -> None:
    rows = [("a", "1", "x " * 40), ("bcd", "22", "")]
    assert table(("", "", ""), [("a", "1", "x"), ("bcd", "22", "y")], (0, 2)) == "a     1  x\nbcd  22  y"
    lines = table(("name", "n", "what"), rows, (0, 2), 40).splitlines()
    assert lines[0] == "name   n  what"
    assert lines[1] == "a      1  " + " ".join("x" * 15)
    assert lines[2] == " " * 10 + " ".join("x" * 15)
    assert lines[-1] == "bcd   22"
    assert max(map(len, lines)) <= 40


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=200)), max_size=3), st.integers(1, 200))
def test_tables_of_any_width_show_all_words(rows: list[tuple[str, str]], width: int) -> None:
    cleaned = [(printable(name), printable(what)) for name, what in rows]
    shown = table(("name", "what"), cleaned, (0, 1), width)
    words = "".join(f"{name}{what}" for name, what in [("name", "what"), *cleaned])
    assert sorted("".join(shown.split())) == sorted("".join(words.split()))
    starts = max(len(name) for name, _ in [("name", ""), *cleaned])
    assert all(len(line) <= max(width, starts + 2 + MIN_WIDTH) for line in shown.split("\n"))


def test_a_record_has_a_row_on_a_line() -> None:
    record = {
        "command": "x",
        "device": {"name": "é"},
        "none": [],
        "rows": [{"op": "norm", "ms": [1.5, 2]}, {"op": "add"}],
    }
    text = record_text(record)
    assert json.loads(text) == record
    assert text.splitlines()[3:] == [' "none": [],', ' "rows": [', *text.splitlines()[5:7], " ]", "}"]
