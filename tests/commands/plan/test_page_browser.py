"""Pages in a headless browser, at the widths of a phone and of a screen. Skipped where there is none."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from megalite.commands.main import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ALLOWED = 1.5  # pixels by which a label may be outside of its picture, or over another: rounding and side bearings
# What is wrong with the page in the frame: it is wider than the frame, or labels of its charts are cut or overlap.
LOOK = """
const page = document.getElementById("page").contentDocument, wrong = [];
const wide = page.documentElement.scrollWidth;
if (wide > WIDTH) wrong.push("the page is " + wide + " pixels wide");
for (const svg of page.querySelectorAll("svg.chart")) {
  const frame = svg.getBoundingClientRect(), seen = [];
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect(), words = text.textContent;
    if (box.left < frame.left - ALLOWED || box.right > frame.right + ALLOWED || box.top < frame.top - ALLOWED ||
        box.bottom > frame.bottom + ALLOWED) wrong.push("cut: " + words);
    for (const [other, theirs] of seen)
      if (Math.min(box.right, other.right) - Math.max(box.left, other.left) > ALLOWED &&
          Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 2 * ALLOWED)
        wrong.push(theirs + " and " + words + " overlap");
    seen.push([box, words]);
  }
}
const bars = page.querySelectorAll(".bar svg rect[class^=c]");
if (!bars.length || ![...bars].some((bar) => bar.getBoundingClientRect().width > 100)) wrong.push("there are no bars");
document.getElementById("found").textContent = JSON.stringify(wrong);
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


def seen(page: str, width: int, folder: Path) -> list[str]:
    """What is wrong with a page in a frame of `width` pixels."""
    look = LOOK.replace("WIDTH", str(width)).replace("ALLOWED", str(ALLOWED))
    frame = f'<iframe id="page" style="border:0;width:{width}px;height:3000px" srcdoc="{escape(page)}"></iframe>'
    outer = folder / "outer.html"
    outer.write_text(
        f"<!DOCTYPE html><meta charset=utf-8>{frame}<pre id=found></pre><script>onload = () => {{{look}}}</script>"
    )
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1400,3000", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-1000:]
    wrong: list[str] = json.loads(unescape(found[1]))
    return wrong


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
