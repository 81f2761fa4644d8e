"""Readers of what others wrote: nvidia-smi's tables and links, and files of thresholds."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.cost.cluster import known_clusters
from megalite_launch.base.errors import UserError
from megalite_launch.preflight.smi import Broken, SmiError, count, flag, link_errors, links, table
from megalite_launch.preflight.thresholds import OWN_FILE, Limits, load_thresholds, parse_sections, read_sections

CELLS = st.text(st.characters(exclude_characters=",\n\r", codec="utf-8", exclude_categories=["Z", "C"]), min_size=1)
COLUMNS = ("a", "b", "c")


@given(st.lists(st.tuples(CELLS, CELLS, CELLS)))
def test_a_table_is_read_as_it_was_printed(rows: list[tuple[str, str, str]]) -> None:
    read = table("".join(", ".join(row) + "\n" for row in rows), COLUMNS)
    assert [tuple(row[column] for column in COLUMNS) for row in read] == rows


@given(st.text())
def test_any_text_is_a_table_or_refused(text: str) -> None:
    try:
        rows = table(text, COLUMNS)
    except SmiError:
        assert any(line.count(",") < 2 for line in text.splitlines())
    else:
        assert all(set(row) == set(COLUMNS) for row in rows)


@given(st.text())
def test_any_cell_is_a_number_nothing_or_broken(text: str) -> None:
    for read in (count, flag):
        try:
            value = read(text)
        except Broken:
            continue
        assert value is None or 0 <= value < 1e18


@pytest.mark.parametrize("cell", ["[N/A]", "N/A", "[Not Supported]", ""])
def test_what_a_gpu_does_not_have_is_nothing(cell: str) -> None:
    assert count(cell) is None
    assert flag(cell) is None


@pytest.mark.parametrize(
    "cell", ["ERR!", "[GPU is lost]", "[GPU requires reset]", "[Unknown Error]", "nan", "-1", "inf"]
)
def test_what_is_no_value_is_broken(cell: str) -> None:
    with pytest.raises(Broken):
        count(cell)
    with pytest.raises(Broken):
        flag(cell)


LINES = st.sampled_from(
    (
        "GPU 0: NVIDIA H200 (UUID: GPU-1)",
        "\t Link 0: 26.562 GB/s",
        "\t Link 1: <inactive>",
        "\t Link 2: . GB/s",
        "\t Link 0: CRC Errors: 9",
        "\t Link 0: FEC Errors - 0: 12",
        "\t Link 0: Effective BER: 15e-255",
    )
)


@given(st.lists(LINES | st.text()).map("\n".join))
def test_any_text_about_links_is_read(text: str) -> None:
    assert all(speed is None or speed > 0 for gpu in links(text) for speed in gpu)
    assert all(value > 0 for value in link_errors(text).values())


def test_links_of_new_drivers_are_counted_without_what_is_corrected() -> None:
    text = """GPU 0: NVIDIA B200 (UUID: GPU-1)
         Link 0: Malformed packet Errors: 0
         Link 0: Rx Errors: 2
         Link 0: Link recovery failed events: 1
         Link 0: Total link recovery events: 5
         Link 0: Symbol Errors: 77
         Link 0: FEC Errors - 0: 123456789
"""
    assert link_errors(text) == {"GPU 0 link 0 Rx Error": 2, "GPU 0 link 0 Link recovery failed event": 1}


KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
NUMBERS = st.floats(-1e6, 1e6) | st.integers(-(10**9), 10**9).map(float)
TEXTS = st.from_regex(r"[A-Za-z][A-Za-z0-9 ._/()]{0,20}[A-Za-z0-9]", fullmatch=True).filter(
    lambda text: text not in ("null", "true", "false", "yes", "no", "on", "off")
)
SCALARS = NUMBERS | TEXTS
VALUES = SCALARS | st.none() | st.lists(SCALARS)


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return "null" if value is None else repr(value) if isinstance(value, float) else str(value)


@settings(max_examples=40)
@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES)), st.sampled_from(["", "  # a comment: [", "\r"]))
def test_sections_are_read_as_they_were_written(sections: dict[str, dict[str, object]], end: str) -> None:
    lines = []
    for name, values in sections.items():
        lines += [f"{name}:{end}", "", *(f"  {key}: {shown(value)}{end}" for key, value in values.items())]
    assert parse_sections("\n".join(lines)) == sections


@settings(max_examples=200)
@given(
    st.text() | st.lists(st.sampled_from(["a:", "  b: 1", "  c: [1, x]", "\td: 2", "- e", "  f: {}"])).map("\n".join)
)
def test_any_text_is_sections_or_refused_by_line(text: str) -> None:
    told = []
    try:
        parse_sections(text)
    except ValueError as error:
        told.append(str(error))
    assert all(problem.startswith("line ") for problem in told)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\n", "line 1: a: a section has its keys on the next lines, indented"),
        ("  a: 1\n", "line 1: a: stands before the first section"),
        ("all:\n  a: 1\n  a: 2\n", "line 3: a: is there twice"),
        ("all:\nall:\n", "line 2: all: is there twice"),
        ("all:\n  a:1\n", "line 2: a: needs a space and a value after the colon"),
        ("all:\n\ta: 1\n", "line 2: starts with a tab; use spaces"),
        ("all:\n  a: {b: 1}\n", "line 2: a: '{b: 1}' must be a number, a text, [a list of these] or null"),
        ("all:\n  a: true\n", "line 2: a: 'true' must be a number"),
        ("all:\n  a: 1e999\n", "line 2: a: 1e999 is too large"),
        ("all:\n  a: &x 1\n", "line 2: a: '&x 1' must be"),
        ("all:\n  - 1\n", "line 2: must be `section:` or `  key: value`, not '- 1'"),
        ("all:\n  smi_second: 1\n", "all: smi_second: is not known; known are "),
        ("all:\n  smi_seconds: fast\n", "all: smi_seconds: must be a number of at least 0, or null"),
        ("all:\n  smi_seconds: -1\n", "all: smi_seconds: must be a number of at least 0, or null"),
        ("all:\n  smi_seconds: [1]\n", "all: smi_seconds: must be a number"),
        ("all:\n  xid_fail: [1.5]\n", "all: xid_fail: must be a list of whole numbers"),
        ("all:\n  names: [x]\n", "all: names: belongs to a kind of GPU"),
        ("h200:\n  cluster: 1\n", "h200: cluster: must be a text or null"),
        ("x100:\n  nvlinks: 4\n", "x100: a new kind needs `names: [...]`"),
        ("x100:\n  names: []\n", "x100: names: must be a list of texts"),
    ],
)
def test_a_bad_file_is_one_message(tmp_path: Path, text: str, problem: str) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(text)
    with pytest.raises(UserError) as error:
        load_thresholds(site)
    assert str(error.value).startswith(f"{site}: {problem}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: cannot be read: No such file"):
        load_thresholds(tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="binary: is not UTF-8"):
        load_thresholds(tmp_path / "binary")
    with (tmp_path / "large").open("wb") as file:
        os.truncate(file.fileno(), 2**30)
    with pytest.raises(UserError, match="large: has more than"):
        load_thresholds(tmp_path / "large")


def test_ours_is_what_yaml_makes_of_it() -> None:
    assert read_sections(OWN_FILE) == yaml.safe_load(OWN_FILE.read_text())


def test_every_figure_of_ours_has_a_source() -> None:
    section = ""
    for line in OWN_FILE.read_text().splitlines():
        if line.endswith(":") or (line[:1].isalpha() and ":  " in line):
            section = line
        elif line.startswith("  "):
            value, _, comment = line.partition("#")
            inherited = section.startswith(("h200", "cpu", "gb200", "a100_40gb", "rtx4090"))  # "as …" stands above
            plain = any(name in value for name in ("names:", "cluster:", "all_reduce_gpus:", ": null"))
            assert comment.strip() or inherited or plain or "nvlink_gb" in value, line


def test_kinds_of_ours_name_clusters_that_there_are_and_keys_of_all() -> None:
    sections = read_sections(OWN_FILE)
    for name, values in sections.items():
        if name != "all":
            assert set(values) <= {*sections["all"], "names", "cluster"}
            assert values.get("cluster") in (None, *known_clusters())


def test_the_example_of_the_page_is_a_file_of_a_site(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/preflight.md").read_text()
    (tmp_path / "site.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    found = load_thresholds(tmp_path / "site.yaml")
    assert found.of("NVIDIA H200").number("save_seconds") == 120
    assert found.of("NVIDIA H100 80GB HBM3").number("network_gb") == 200
    assert found.of("NVIDIA L4").number("temperature_warn") is None


def test_a_site_replaces_single_keys_and_adds_kinds(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("all:\n  inodes: 5\nh200:\n  nvlinks: null\nx100:\n  names: [NVIDIA L4]\n  nvlinks: 4\n")
    found = load_thresholds(site)
    assert found.of("NVIDIA H200").number("nvlinks") is None
    assert found.of("NVIDIA H200").number("nvlink_gb") == 26.5
    assert found.of("NVIDIA H200").number("inodes") == 5
    assert found.of("NVIDIA L4").number("nvlinks") == 4
    assert found.of("NVIDIA L40") == Limits(found.sections["all"])  # of no kind that is known
    assert found.of("NVIDIA H100 80GB HBM3").numbers("xid_warn") == [63, 94]
