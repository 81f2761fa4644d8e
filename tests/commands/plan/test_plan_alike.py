"""Layouts that predictions do not tell apart: which is the simplest, and how another row than the first is taken."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from commands import in_process

from megalite.commands.main import main
from megalite.commands.plan.near_ties import simplest, told_alike
from megalite.config.load import load
from megalite.cost.layout_choice import Choice
from megalite.layout_search.search import Result

GIB = 1 << 30
PLAIN = Choice(
    tp=1,
    ep=1,
    cp=1,
    method="ring",
    pp=1,
    micro=1,
    recompute="none",
    schedule="1f1b",
    virtual=None,
    replicas=1,
    shards=8,
    mode="zero2",
    offload_activations=False,
    states="device",
)
PIPE = PLAIN._replace(pp=2, shards=4)
MOVED = PIPE._replace(split=(17, 15))


def results(*found: tuple[Choice, float, float]) -> Sequence[Result]:
    """Of layouts, seconds and GiB."""
    return [
        cast(Result, SimpleNamespace(choice=choice, seconds=seconds, memory=round(gib * GIB)))
        for choice, seconds, gib in found
    ]


def test_the_simplest_of_equally_fast_layouts_is_told() -> None:
    found = results((MOVED, 10.0, 71.7), (PIPE, 10.02, 60.0), (PLAIN, 10.09, 69.0), (PLAIN, 10.2, 1.0))
    assert simplest(found[:3]) == 2
    told = told_alike(found, more=True)
    assert told.startswith("Rows 1 to 3 are within 1% of each other: predictions do not tell them apart.")
    assert "The simplest is row 3: no pipeline, no moved layers, 2.70 GiB less memory. --pick 3 takes" in told


def test_a_layout_beyond_the_limit_is_not_told() -> None:
    assert told_alike(results((PIPE, 10.0, 60.0), (PLAIN, 10.11, 50.0)), more=False) == ""


def test_nothing_is_told_where_the_fastest_is_the_simplest() -> None:
    assert told_alike(results((PLAIN, 10.0, 60.0), (PIPE, 10.0, 50.0)), more=True) == ""
    assert told_alike(results((PLAIN, 10.0, 60.0), (PLAIN, 10.0, 59.9)), more=True) == ""
    assert told_alike(results((PLAIN, 10.0, 60.0)), more=False) == ""


def test_equally_simple_layouts_differ_in_memory() -> None:
    found = results((PLAIN, 10.0, 60.0), (PLAIN._replace(mode="zero3"), 10.05, 40.0))
    told = told_alike(found, more=False)
    assert told.startswith("Rows 1 to 2 are within 1% of each other: ")
    assert "The simplest is row 2: 20.0 GiB less memory. " in told
    found = results((PIPE, 10.0, 50.0), (PLAIN, 10.05, 60.0))
    told = told_alike(found, more=True)
    assert "within 1% of each other, and perhaps further ones, which a larger --top shows: " in told
    assert "row 2: no pipeline, 10.0 GiB more memory. " in told


DOCUMENTS = ["data.mask_documents=true", "data.end_of_document=0"]
EIGHT = ["plan", "configs/model/llama3_8b.yaml", "batch.global=2048", *DOCUMENTS, "--gpus", "8"]


def test_a_node_of_eight_gpus_tells_of_plain_data_parallelism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "picked.yaml", tmp_path / "first.yaml", tmp_path / "plan.html"
    run = in_process(main, capsys)
    code, picked, _ = run(*EIGHT, "--top", 2, "--pick", 2, "--explain", "--write", files[0], "--html", files[2])
    assert code == 0
    assert "The simplest is row 2: no pipeline, no moved layers, 2.60 GiB less memory. " in picked
    assert "The simplest is row 2: no pipeline" in files[2].read_text()
    page = files[2].read_text()
    assert "Pipeline timeline of row 2" in page
    assert "Who talks to whom of row 2" in page
    (layout,) = re.findall(r"^2 +(\S.*?)  ", picked, flags=re.MULTILINE)
    assert f"\n{layout}, on 8 GPUs of NVIDIA" in picked  # the explanation
    assert f"same layout: {layout}" in page  # in the charts of scaling
    assert f"{files[0]}: row 2" in picked
    assert files[0].read_text().startswith(f"# {layout}, planned for 8 ×")
    assert load([str(files[0])]).parallel.pp == 1
    assert run(*EIGHT, "--top", 2, "--write", files[1])[0] == 0
    assert load([str(files[1])]).parallel.pp == 2


def test_a_row_beyond_those_shown_is_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["plan", "configs/model/tiny.yaml", "batch.global=4", "--gpus", 1, "parallel.pp=1"]
    run = in_process(main, capsys)
    code, out, _ = run(*few, "--top", 1, "--pick", 3)
    assert code == 0
    assert len(re.findall(r"^\d+  micro", out, flags=re.MULTILINE)) == 3
    code, out, errors = run(*few, "--pick", 1000)
    assert (code, out) == (2, "")
    assert re.search(r"--pick 1000: there is no such row, as only \d+ layouts can run and fit; use one of", errors)
    for others in (["--as-is", "batch.micro=1"], ["--dry-run"], ["--compare"], ["--gpus", "1-2"]):
        code, out, errors = run(*few, *others, "--pick", 1)
        assert (code, out) == (2, "")
        assert "--pick: is not read by" in errors
