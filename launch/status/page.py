"""A read-only page of a run: one file, which needs neither a network nor scripts. `write` keeps it up to date."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Optional

from ..base.files import SHARED_MODE, write_whole
from ..base.texts import clock, lasting, printable, share
from ..page.charts import account_bar, attempts_chart, curve_chart
from ..page.html import Key, escape, paragraph, section, table
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
PAGE_STYLE = """
.lane { fill: var(--panel); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
.facts dt { color: var(--pale); }
.facts dd { margin: 0; min-width: 0; }
.state { display: inline-block; padding: .1rem .6rem; border-radius: 6px; color: #fff; font-weight: 600; }
.good { background: #2f7d43; } .wait { background: #7a6200; } .bad { background: #b3261e; }
"""
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
    name = run.folder.path.resolve().name
    parts = [_head(name, found), _time(found), _curves(run), _attempts(found), _nodes(found), _decisions(found)]
    foot = paragraph(
        f"Written at {clock(found['time'])} from {printable(run.folder.path)}; it loads nothing, and only shows.",
        "pale",
    )
    page = document(f"{name}: {found['text']}", "\n".join([*filter(None, parts), f"<footer>{foot}</footer>"]))
    refresh = "" if found["over"] else REFRESH
    return page.replace("</style>", f"{PAGE_STYLE}</style>", 1).replace("<title>", f"{refresh}<title>", 1)


def _head(name: str, found: Summary) -> str:
    kind = "good" if found["state"] in GOOD_STATES else "bad" if found["state"] in BAD_STATES else "wait"
    items = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in facts(found))
    state = f'<p><span class="state {kind}">{escape(found["text"])}</span></p>'
    return f'<header><h1>{escape(printable(name))}</h1>{state}<dl class="facts">{items}</dl></header>'


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


def _curves(run: Watched) -> str:
    ledger = run.ledger
    valid = [(float(step), loss) for step, loss in run.valid]
    losses = curve_chart(
        "Loss",
        lambda value: f"{value:.3g}",
        [("loss", list(zip(ledger.steps, ledger.losses)), 0), ("valid loss", valid, 1)],
    )
    times = curve_chart("Time of a step", lasting, [("a step", list(zip(ledger.steps, ledger.seconds)), 2)])
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
