"""A headless browser that looks at pages, where there is one."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

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
