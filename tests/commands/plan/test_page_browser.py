"""Pages in a headless browser, at the widths of a phone and of a screen. Skipped where there is none."""

from pathlib import Path

import pytest
from browser import BROWSER, seen

from megalite.commands.main import main

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize(
    "options",
    [
        ["--gpus", "8", "--as-is", "batch.micro=2", "parallel.pp=2", "parallel.tp=2", "parallel.dp_replicate=2"],
        ["--gpus", "2-64", "--tokens", "20B"],
    ],
)
def test_nothing_is_cut_or_overlaps(options: list[str], width: int, tmp_path: Path):
    path = tmp_path / "page.html"
    assert main(["plan", "configs/model/small_60m.yaml", "batch.global=64", "--html", str(path), *options]) == 0
    assert seen(path.read_text(), width, tmp_path) == []


def test_a_cut_label_is_seen(tmp_path: Path):
    page = (
        '<div class="bar"><svg width="200"><rect class="c0" width="150" height="9"/></svg></div>'
        '<svg class="chart" width="90" height="40"><text x="60" y="20">cut label</text>'
        '<text x="62" y="22">b</text></svg>'
        '<div style="width:900px">wide</div>'
    )
    found = seen(page, 400, tmp_path)
    assert [words.partition(" ")[0] for words in found] == ["the", "cut:", "cut"]
