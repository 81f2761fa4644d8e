"""Schedules as files."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import free_table, randoms, tables

from megalite.base.errors import InputError
from megalite.config.rules.parallel import MAX_SCHEDULE_BYTES
from megalite.config.yaml import parse
from megalite.schedule.actions import Table
from megalite.schedule.check import check
from megalite.schedule.communication import communicate
from megalite.schedule.file import complete, read, write
from megalite.schedule.simulate import simulate

GOOD = """\
name: "mine"
micro_batches: 2
placement: [0, 1]
ranks:
  - F0.0 F0.1 B0.0 B0.1
  - F1.0 B1.0 F1.1 I1.1 W1.1
"""


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.sampled_from(
    ["1e5", "null", "1:30"]
)


@settings(deadline=None)
@given(st.one_of(tables(5, 9), randoms.map(free_table).filter(lambda table: all(table.programs))), NAMES)
def test_what_is_written_is_read(table: Table, name: str) -> None:
    named = Table(name, table.micro_batches, table.placement, table.programs)
    again = complete(parse(write(named)))
    assert (again.name, again.micro_batches, again.placement) == (name, table.micro_batches, table.placement)
    assert again.orders == table.orders
    assert again.programs == communicate(table.orders, table.placement)
    assert check(again) == []


def test_times_are_written_and_place_the_transfers() -> None:
    text = GOOD + "times: [[1.0, 2.0, 1.0, 1.0], [0.5, 5.0, 2.5, 0.0]]\n"
    table = complete(parse(text))
    assert table.times == ((1.0, 2.0, 1.0, 1.0), (0.5, 5.0, 2.5, 0.0))
    assert table.programs == communicate(table.orders, table.placement, table.times)
    assert float(simulate(table).makespan) == 1 + 0.5 + 5 + 0.5 + 2.5 + 2
    assert write(table) == text


@pytest.mark.parametrize(
    "times",
    [
        "7",
        "[[1, 2, 1, 1]]",
        "[[1, 2, 1, 1], [1, 2, 1]]",
        "[[1, 2, 1, 1], [0, 2, 1, 1]]",
        "[[1, 2, 1, .inf], [1, 1, 1, 1]]",
        "[[1, 2, 1, -1], [1, 1, 1, 1]]",
    ],
)
def test_times_that_are_none_are_told(times: str) -> None:
    with pytest.raises(InputError) as caught:
        complete(parse(f"{GOOD}times: {times}\n"))
    assert str(caught.value) == (
        "times must be a list of 2, one for each stage, of the times of F, B, I, W, of which only that of W may be 0, "
        "and at most 1e+09 each"
    )


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("[0, 1]", "[0, 1]  # a comment"))
    table = read(path)
    assert (table.name, table.micro_batches, table.ranks, table.stages) == ("mine", 2, 2, 2)
    assert write(table) == GOOD


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("F0.1", "F0,1", "rank 0 has 'F0,1', which is not a kind of F, B, I, W with STAGE.MICRO-BATCH, as in F0.3"),
        (" F0.1", "", "rank 0 lacks F(stage 0, micro-batch 1)"),
        ("I1.1 W1.1", "I1.1", "rank 1 lacks W(stage 1, micro-batch 1)"),
        ("W1.1", "W1.1 B1.1", "rank 1 has B(stage 1, micro-batch 1), but also I or W of it"),
        ("F0.1", "F0.1 F0.1", "rank 0 has F(stage 0, micro-batch 1) 2 times"),
        ("F0.1", "F0.2", "rank 0 has F(stage 0, micro-batch 2) in a schedule of 2 stages and 2 micro-batches"),
        ("F0.1", "F1.1", "rank 0 has F(stage 1, micro-batch 1) whose stage is on rank 1"),
        ("[0, 1]", "[0, 0]", "rank 1 has no stage in placement"),
        ("[0, 1]", "[0, 2]", "placement names rank 2, but the file has 2 ranks, counted from 0"),
        ("[0, 1]", "[0, 1, 2]", "placement names rank 2, but the file has 2 ranks, counted from 0"),
        ("[0, 1]", "[0, yes]", "placement must be a list of ranks, not [0, True]"),
        ("batches: 2", "batches: 0", "micro_batches must be a whole number above 0, not 0"),
        ("batches: 2", "batches: 999999999", "micro_batches is more than all actions of the ranks"),
        ('"mine"', "7", "name must be a text, not 7"),
        (
            'name: "mine"\n',
            "",
            "must have the keys name, micro_batches, placement, ranks, may have times, and no others",
        ),
        ('"mine"', "[mine", "is not valid YAML: line 2, column 14: expected ',' or ']', but got ':'"),
        (
            '"mine"',
            "!!python/object/apply:os.getcwd []",
            "is not valid YAML: line 1, column 7: the tag tag:yaml.org,2002:python/object/apply:os.getcwd has no "
            "meaning here",
        ),
        (
            "F1.0 B1.0",
            "B1.0 F1.0",
            "the pipeline schedule cannot make progress: rank 0 is stuck at B(stage 0, micro-batch 0), which needs "
            "B(stage 1, micro-batch 0); rank 1 is stuck at B(stage 1, micro-batch 0), which needs F(stage 1, "
            "micro-batch 0)",
        ),
    ],
)
def test_what_is_wrong_is_told_with_the_file(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {message}"


def test_all_problems_are_told_up_to_a_point() -> None:
    with pytest.raises(InputError) as caught:
        complete(parse(GOOD.replace("F0.0 F0.1 B0.0 B0.1", "").replace("- \n", '- ""\n').replace("es: 2", "es: 3")))
    assert str(caught.value).startswith(
        "rank 0 lacks B(stage 0, micro-batch 0); rank 0 lacks B(stage 0, micro-batch 1)"
    )
    assert str(caught.value).endswith("; rank 1 lacks F(stage 1, micro-batch 2)")


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_an_unreadable_file(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    if content:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"mine\.yaml: (is not UTF-8 text|cannot be read: No such file or directory)"):
        read(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("[" * 3000 + "]" * 3000, "is nested more than 32 deep"),
        ("&a [" + "1, " * 200 + "]\nb: &b [" + "*a, " * 200 + "]", "has more than 20,000 values"),
        ("&a [*a]", "refers to what it is inside of"),
        ("a\nname: b", "found duplicate key name"),
        (str(9) * 5000, "a whole number of 5,000 digits"),
        ("a\n# " + "x" * MAX_SCHEDULE_BYTES, "has more than 16,777,216 bytes"),
    ],
    ids=["deep", "bomb", "circle", "twice", "digits", "long"],
)
def test_a_hostile_file(name: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace('"mine"', name))
    with pytest.raises(InputError, match=f"mine.yaml: .*{told}"):
        read(path)


@pytest.mark.timeout(20)
def test_a_pipe_is_no_schedule(tmp_path: Path) -> None:
    """To read it would wait for a writer without end."""
    os.mkfifo(tmp_path / "mine.yaml")
    with pytest.raises(InputError, match="is no regular file"):
        read(tmp_path / "mine.yaml")


def test_a_file_of_more_actions_than_can_be_planned_is_refused() -> None:
    ranks = [" ".join(f"{kind}{rank}.{micro}" for kind in "FB" for micro in range(1000)) for rank in range(2)]
    content = {"name": "long", "micro_batches": 1000, "placement": [0, 1] * 200, "ranks": ranks}
    with pytest.raises(
        InputError, match="makes 2,396,000 actions, transfers included, more than the 1,000,000 that can"
    ):
        complete(content)
    content["placement"] = [0] * 501
    with pytest.raises(InputError, match="makes 1,002,000 actions"):
        complete(content)
