"""A read-only page of a run: one file, which needs neither a network nor scripts. `write` keeps it up to date."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..base.files import SHARED_MODE, write_whole
from ..base.texts import clock, lasting, printable, share
from ..page.charts import account_bar, attempts_chart, curve_chart
from ..page.html import Key, badge, definitions, escape, paragraph, section, table
from ..page.style import document
from ..watch.ledger import ACCOUNTS
from ..watch.run import Watched
from ..watch.summary import Summary, summary
from ..watch.text import ACCOUNT_NAMES, against, attempt_row, facts

PAGE_NAME = "status.html"  # in the run folder
PAGE_PERIOD = 30.0  # seconds between two versions of a page
# Places in style.COLOURS, by account.
COLOUR = {"training": 2, "saving": 0, "evaluating": 8, "restarting": 1, "lost": 3, "waiting": 6}
ATTEMPTS, DECISIONS = 100, 30  # latest ones in tables
REFRESH = '<meta http-equiv="refresh" content="60">\n'
GOOD_STATES, BAD_STATES = ("running", "saving", "finished"), ("failed", "silent")

_watched: dict[Path, tuple[Watched, float]] = {}  # runs that this process writes pages of, and when it last did


def write(run: Path, now: Optional[float] = None, at_once: bool = False) -> bool:
    """Write `RUN/status.html`, unless that was tried less than PAGE_PERIOD seconds ago. Returns whether it was written.

    A page is no reason to fail: what cannot be written is passed over, and tried again after PAGE_PERIOD. Only what has
    come since the call before is read. at_once: write in any case, as at the end.
    """
    moment = time.time() if now is None else now
    watched, written = _watched.get(run, (None, 0.0))
    if watched is not None and not at_once and 0 <= moment - written < PAGE_PERIOD:
        return False
    watched = watched or Watched(run)
    _watched[run] = watched, moment
    try:
        watched.update(moment)
        write_whole(run / PAGE_NAME, render(watched, summary(watched)), SHARED_MODE)
    except OSError:
        return False
    return True


def render(run: Watched, found: Summary) -> str:
    """The page of a run."""
    page = whole_page(run, found, sections(run, found))
    return page if found["over"] else page.replace("<title>", f"{REFRESH}<title>", 1)


def whole_page(run: Watched, found: Summary, parts: Sequence[str]) -> str:
    """A document about a run. parts: HTML; empty ones are left out."""
    name = run.folder.path.resolve().name
    foot = paragraph(
        f"Written at {clock(found['time'])} from {printable(run.folder.path)}; it loads nothing, and only shows.",
        "pale",
    )
    return document(f"{name}: {found['text']}", "\n".join([*filter(None, parts), f"<footer>{foot}</footer>"]))


def sections(run: Watched, found: Summary, predicted: Optional[float] = None) -> list[str]:
    """The parts of a page that tell how a run does; "" for one without content. predicted: seconds of a step."""
    return [
        _head(run.folder.path.resolve().name, found),
        _time(found),
        _curves(run, predicted),
        _attempts(found),
        _nodes(found),
        _decisions(found),
    ]


def _head(name: str, found: Summary) -> str:
    kind = "good" if found["state"] in GOOD_STATES else "bad" if found["state"] in BAD_STATES else "wait"
    items = definitions(facts(found))
    return f"<header><h1>{escape(printable(name))}</h1>{badge(found['text'], kind)}{items}</header>"


def _time(found: Summary) -> str:
    if not found["wall"]:
        return ""
    accounts = found["accounts"]
    rows = [
        (Key(ACCOUNT_NAMES[name], f"c{COLOUR[name]}"), lasting(accounts[name]), f"{accounts[name] / found['wall']:.2%}")
        for name in ACCOUNTS
        if accounts[name]
    ]
    total = ("all", lasting(found["wall"]), "100.00%")
    bar = account_bar(accounts, COLOUR, ACCOUNT_NAMES, f"{share(found['goodput'])} training")
    return section("Where time went", bar, table(("", "time", "share"), [*rows, total]))


def _curves(run: Watched, predicted: Optional[float]) -> str:
    ledger = run.ledger
    valid = [(float(step), loss) for step, loss in run.valid]
    losses = curve_chart(
        "Loss",
        lambda value: f"{value:.3g}",
        [("loss", list(zip(ledger.steps, ledger.losses)), 0), ("valid loss", valid, 1)],
        upright=run.returns,
    )
    level = None if predicted is None else (f"predicted, {lasting(predicted)}", predicted)
    seconds = list(zip(ledger.steps, ledger.seconds))
    times = curve_chart("Time of a step", lasting, [("a step", seconds, 2)], level, run.returns)
    charts = [
        f"<div><h3>{title}</h3>{chart}</div>" for title, chart in (("Loss", losses), ("Time of a step", times)) if chart
    ]
    return section("Training", f'<div class="columns">{"".join(charts)}</div>') if charts else ""


def _attempts(found: Summary) -> str:
    attempts = found["attempts"]
    if not attempts:
        return ""
    bars = [(each["name"], each["began"], each["began"] + each["seconds"], each["accounts"]) for each in attempts]
    rows = [attempt_row(each, 300) for each in reversed(attempts[-ATTEMPTS:])]
    header = ("attempt", "began", "took", "nodes", "from step", "saved step", "how it ended")
    return section(
        f"Attempts: {len(attempts):,}",
        attempts_chart(bars, COLOUR, ACCOUNT_NAMES),
        table(header, rows, (0, 6), "attempts"),
    )


def _nodes(found: Summary) -> str:
    rows = [(node["node"], against(node)) for node in found["nodes"]]
    return section("Nodes to look at", table(("node", "what is known against it"), rows, (0, 1))) if rows else ""


def _decisions(found: Summary) -> str:
    latest = reversed(found["decisions"][-DECISIONS:])
    rows = [(clock(each["time"]), f"{each['by']}: {printable(each['text'], 500)}") for each in latest]
    return section("Latest decisions", table(("time", "what"), rows, (0, 1))) if rows else ""
