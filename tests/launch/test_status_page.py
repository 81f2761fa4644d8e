"""The page of a run: it loads nothing, has the numbers, and can be read on a phone, in the dark and on paper."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from made_up_run import MadeUp, made_up

sys.path.insert(0, str(Path(__file__).parents[1] / "advice"))

from browser import BROWSER, seen
from page_cases import Page

from megalite_launch.page.charts import MAX_POINTS, curve_chart, thinned
from megalite_launch.status import page
from megalite_launch.watch.run import Watched
from megalite_launch.watch.summary import summary
from megalite_launch.watch.text import status_text

HOSTILE = "<img src=x onerror=alert(1)>&\"'\x1b[2J"


def rendered(path: Path, now: float) -> str:
    run = Watched(path)
    run.update(now)
    return page.render(run, summary(run))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = made_up(tmp_path_factory.mktemp("page") / "pretrain")
    return rendered(run.run.path, run.now + 1)


def test_a_page_has_the_numbers_and_loads_nothing(text: str) -> None:
    found = Page(text)
    for words in ("pretrain", "running", "1,200 of 2,000, 40 done again", "Where time went", "Time of a step",
                  "Attempts: 3", "crash: rank 9 on n002", "first to fail 2 ×", "requeued: only 1 healthy"):  # fmt: skip
        assert words in found.text
    assert found.loaded == []
    assert "url(" not in text
    assert "@import" not in text
    assert len(found.pictures) == 4
    assert "@media print" in text
    assert "prefers-color-scheme: dark" in text


def test_bars_of_attempts_are_as_long_as_their_times(text: str) -> None:
    chart = Page(text).pictures[3]
    boxes = [box for box in chart if box.get("class") != "lane"]
    by_row: dict[str, float] = {}
    for box in boxes:
        by_row[box.get("y", "")] = by_row.get(box.get("y", ""), 0) + float(box.get("width", ""))
    lengths = list(by_row.values())
    assert lengths[0] / lengths[1] == pytest.approx(937 / 804, rel=0.01)
    assert max(float(box.get("x", "")) + float(box.get("width", "")) for box in boxes) == pytest.approx(1000, abs=0.1)


def test_a_phone_has_how_attempts_ended_on_a_line_of_its_own(text: str) -> None:
    """Seven columns are wider than its screen, and the last one would only be seen by scrolling sideways."""
    table = text[text.index('<table class="attempts">') :]
    assert "how it ended" in table[: table.index("</thead>")]
    narrow = text[text.index("@media (max-width: 40rem)") : text.index("@media print")]
    assert ".attempts tr { display: grid" in narrow
    assert ".attempts :is(th, td):last-child { grid-column: 1 / -1; }" in narrow


def test_texts_of_others_are_escaped(tmp_path: Path) -> None:
    run = MadeUp(tmp_path / "run")
    run.job(0, 1)
    run.event("attempt", HOSTILE, HOSTILE, attempt=HOSTILE, nodes=[HOSTILE], ranks=1, step=0)
    run.event("straggler", HOSTILE, HOSTILE, node=HOSTILE)
    first = {"rank": 0, "node": HOSTILE, "text": HOSTILE}
    run.event("attempt_ended", HOSTILE, HOSTILE, attempt=HOSTILE, cause=HOSTILE, first=first)
    run.event("end", HOSTILE, HOSTILE, code=1, reason=HOSTILE)
    text = rendered(run.run.path, run.now)
    found = Page(text)
    assert found.loaded == []
    assert "\x1b" not in text
    assert found.text.count("<img src=x onerror=alert(1)>&\"'") >= 6
    assert "refresh" not in text, "nothing more is to come"


@pytest.mark.parametrize("losses", [(1e308, -1e308), (5e-324, 0.0), (1e308, 1e-308), (3.0, 3.0), (1e99, -1e99)])
def test_any_loss_has_a_page_and_a_status(losses: tuple[float, float], tmp_path: Path) -> None:
    (tmp_path / "starts").mkdir()
    os.mkfifo(tmp_path / "starts/001.json")  # which is not waited for
    records = [{"step": step, "time": 1.7e9 + step, "step_seconds": 1.0, "loss": loss, "tokens_per_second": 1e308}
               for step, loss in enumerate(losses, 1)]  # fmt: skip
    records += [{"step": 2, "time": 1.7e9 + 3, "valid_loss": losses[0]}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert "Time of a step" in rendered(tmp_path, 1.7e9 + 9)
    run = Watched(tmp_path)
    run.update(1.7e9 + 9)
    assert len(status_text(summary(run))) < 2000
    curve_chart("Loss", str, [("loss", list(enumerate(losses)), 0)])


def test_a_page_is_written_now_and_then_and_whole(tmp_path: Path) -> None:
    run = MadeUp(tmp_path / "run")
    run.job(0, 1)
    path = tmp_path / "run"
    assert page.write(path, run.now)
    assert not page.write(path, run.now + page.PAGE_PERIOD - 1)
    run.attempt("1.0.0", 30)
    assert page.write(path, run.now)
    assert "30 of 2,000" in (path / "status.html").read_text()
    assert page.write(path, run.now, at_once=True)
    assert {each.name for each in path.iterdir()} == {"events.jsonl", "metrics.jsonl", "starts", "status.html"}
    (path / "status.html").unlink()
    (path / "status.html").mkdir()
    assert not page.write(path, run.now, at_once=True), "what cannot be written is passed over"
    assert not list(path.glob(".status*"))


@pytest.mark.parametrize("count", [0, 1, 2, 399, 5000])
def test_curves_keep_their_ends_and_peaks(count: int) -> None:
    points = [(float(at), 1.0 + (at == 777) * 0.5) for at in range(count)]
    kept = thinned([*points, (1e9, float("nan"))])
    assert len(kept) <= MAX_POINTS + 2
    assert kept == sorted(kept)
    if count > 777:
        assert (777.0, 1.5) in kept
    chart = curve_chart("Loss", str, [("loss", points, 0)])
    assert bool(chart) == bool(count)


def test_a_page_of_a_million_steps_is_small_and_fast(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    for step in range(1, 300_001):
        run.ledger.record(1_790_000_000_000_000 + step * 10**6, step, 10**6, 2.0, 1.0)
    run.update(1.79e9 + 300_001)
    began = time.process_time()
    text = page.render(run, summary(run))
    assert len(text) < 100_000
    assert time.process_time() - began < 5


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_cut_or_overlaps(text: str, width: int, tmp_path: Path) -> None:
    assert seen(text, width, tmp_path) == []
