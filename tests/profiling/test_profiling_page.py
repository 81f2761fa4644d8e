"""The table, the chart of memory, the page and the command about profiled steps."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import in_process
from page_cases import Page
from trace_cases import EVENTS, content

from megalite.commands.main import main
from megalite.config.layout import Layout
from megalite.profiling.about import About
from megalite.profiling.breakdown import breakdown
from megalite.profiling.expected import Expected
from megalite.profiling.memory import MAX_POINTS, memory_chart, memory_curve
from megalite.profiling.page import MAX_RANKS, page
from megalite.profiling.ranks import RankProfile
from megalite.profiling.tables import parts_table, table_text
from megalite.profiling.trace_file import trace_of

PARTS = {"products": 0.0003, "attention": 0.0001, "passes": 5e-5, "offload": 1e-5, "tensor": 0.0, "data": 0.0001}
EXPECTED = Expected("h100", 0.0009, PARTS | {"slowest": 2e-5, "host": 3e-4}, ((1.0, 2.0, 1.0, 1.0),), 0.5)


def memory(at: float, size: int, device: int = 1) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "ts": at, "args": {"Device Type": device, "Total Allocated": size}}


def test_the_rows_of_the_table_stand_beside_the_prediction() -> None:
    trace = trace_of(content(EVENTS))
    lines = table_text(parts_table(breakdown(trace), 1, EXPECTED)).splitlines()
    rows = {cells[0]: cells[1:] for line in lines[2:] if (cells := re.split(r"\s{2,}", line.strip()))}
    assert rows == {
        "matrix products": ["200 µs", "20.0%", "300 µs"],
        "attention": ["100 µs", "10.0%", "100 µs"],
        "passes over memory": ["70.0 µs", "7.0%", "60.0 µs"],
        "fused kernels": ["30.0 µs", "3.0%"],
        "copies": ["20.0 µs", "2.0%"],
        "pointwise kernels": ["20.0 µs", "2.0%"],
        "optimizer": ["100 µs", "10.0%", "0"],
        "tensor-parallel communication": ["90.0 µs", "9.0%", "100 µs", "10%", "0"],
        "pipeline messages, and waiting for stages": ["40.0 µs", "4.0%", "40.0 µs", "0%", "0"],
        "data-parallel communication": ["80.0 µs", "8.0%", "260 µs", "69%", "120 µs"],
        "waiting for data": ["100 µs", "10.0%"],
        "waiting for the host": ["220 µs", "22.0%", "300 µs"],
        "step": ["1.00 ms", "100.0%", "900 µs"],
    }
    without = table_text(parts_table(breakdown(trace), 2))
    assert "predicted" not in without
    assert re.search(r"^step +500 µs +100\.0%$", without, re.MULTILINE)


def test_what_a_run_adds_comes_back_from_a_trace_as_it_was() -> None:
    about = About(0, 5, 6, 1, Layout().coordinates(0), {"3": "dp"}, EXPECTED)
    assert About.read(json.loads(json.dumps(about.plain()))) == about
    assert About.read(replace(about, expected=None).plain()).expected is None


def test_memory_is_that_of_the_gpu_in_the_steps_and_the_highest_of_each_while() -> None:
    changes = [memory(-5, 1 << 30), memory(100, 3 << 30, device=0), memory(500, 2 << 30), memory(500.5, 4 << 30)]
    trace = trace_of(content([*EVENTS, *changes, memory(501, 1 << 30), memory(1001, 9 << 30)]))
    assert memory_curve(trace) == [(0.5005, float(4 << 30))]
    many = trace_of(content([*EVENTS, *(memory(at / 4, at) for at in range(4000))]))
    assert len(memory_curve(many)) == MAX_POINTS
    assert "GiB allocated" in memory_chart({0: memory_curve(trace)})
    assert memory_chart({0: memory_curve(trace_of(content(EVENTS)))}) == ""


def test_the_page_is_whole_and_escapes_what_it_shows() -> None:
    traces = (trace_of(content([*EVENTS, memory(5, 10), memory(50, 30)], rank=rank)) for rank in range(MAX_RANKS + 2))
    shown = page("<b>", [RankProfile.of(trace) for trace in traces], None)
    Page(shown)
    assert "&lt;b&gt;: profiled steps 5 to 5" in shown
    assert shown.count("<h3>rank ") == MAX_RANKS
    assert "2 more ranks are left out" in shown
    assert "MiB allocated" in shown


def test_the_command_tells_draws_and_names_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile/step-000005"
    folder.mkdir(parents=True)
    (folder / "rank-0.json.gz").write_bytes(gzip.compress(json.dumps(content(EVENTS)).encode()))
    (tmp_path / "profile/step-000002").mkdir()
    code, out, _ = in_process(main, capsys)("profile", tmp_path)
    assert code == 0
    assert "steps 5 to 5, rank 0, which computes most of 1 trace" in out
    assert re.search(r"matrix products +200 µs +20\.0%", out)
    assert str(folder / "index.html") in out
    assert "matrix products" in Page((folder / "index.html").read_text()).text
    assert (folder / "timeline.svg").read_text().startswith("<svg")
    (folder / "timeline.svg").unlink()
    (folder / "timeline.svg").symlink_to(tmp_path / "elsewhere")
    code, _, error = in_process(main, capsys)("profile", tmp_path)
    assert (code, "is a link, and stays one" in error) == (2, True)


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        ([], "has no profile; train with profile.start=STEP to make one"),
        (["profile/other"], "has no profile; train with profile.start=STEP to make one"),
        (["profile/step-000005"], "step-000005: has no trace; it is written when the last profiled step has ended"),
    ],
)
def test_a_run_without_traces_is_bad_input(
    folders: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    code, _, error = in_process(main, capsys)("profile", tmp_path)
    assert code == 2
    assert told in error


def test_a_link_in_place_of_a_profile_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other/step-000005").mkdir(parents=True)
    (tmp_path / "profile").symlink_to("other")
    code, _, error = in_process(main, capsys)("profile", tmp_path)
    assert code == 2
    assert "profile: is a link, which is not followed; put a folder in its place" in error
