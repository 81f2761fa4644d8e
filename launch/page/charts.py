"""Pictures of a run: curves over steps, and attempts over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil

from .html import Key, escape, legend
from .lines import Axis, Line, Point, line_chart

MAX_POINTS = 400  # points of a curve: as many as a picture can show
MAX_ROWS = 60  # attempts that are drawn
ROW_HEIGHT, GAP, LENGTH = 14, 5, 1000
MIN_VALUE, MAX_VALUE = 1e-100, 1e100  # smallest value that differs from 0, and largest that an axis can show


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Thin out points to at most about `most` that look the same: the lowest and the highest of every stretch.

    Values for which no axis has numbers are left out; those next to 0 are 0.
    """
    good = [(step, value if abs(value) > MIN_VALUE else 0.0) for step, value in points if abs(value) < MAX_VALUE]
    if len(good) <= most:
        return good
    size = ceil(len(good) / (most // 2))
    kept: list[Point] = []
    for at in range(0, len(good), size):
        stretch = good[at : at + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def curve_chart(
    title: str,
    unit: Callable[[float], str],
    curves: Sequence[tuple[str, Sequence[Point], int]],
    level: tuple[str, float] | None = None,
    upright: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves over steps. unit: the text of a value. curves: name, points and the number of a colour.

    level: name and value of a broken line across, such as a prediction. upright: as for `line_chart`.
    """
    lines = [Line(name, thinned(points), colour, dots=False) for name, points, colour in curves]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    if level is not None:
        ends = [place(step for line in lines for step, _ in line.points) for place in (min, max)]
        lines.append(Line(level[0], [(end, level[1]) for end in ends], ideal=True))
    steps = Axis("step", lambda step: f"{step:,.0f}", near=True, mark_step=1.0)
    return line_chart(title, steps, Axis("", unit, near=True), lines, upright)


def attempts_chart(
    rows: Sequence[tuple[str, float, float, dict[str, float]]], colours: dict[str, int], names: dict[str, str]
) -> str:
    """A bar for every attempt on one axis of time: where it lies is when it was, its colours are where its time went.

    rows: name, begin, end and the seconds of every account. The parts of a bar are not in their order of time.
    """
    shown = rows[-MAX_ROWS:]
    if not shown:
        return ""
    first, last = min(row[1] for row in shown), max(row[2] for row in shown)
    scale = LENGTH / max(last - first, 1.0)
    height = len(shown) * (ROW_HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LENGTH} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="attempts over time" style="height: {height}px">'
    ]
    for at, (name, began, ended, spent) in enumerate(shown):
        y = at * (ROW_HEIGHT + GAP)
        parts.append(f'<rect x="0" y="{y}" width="{LENGTH}" height="{ROW_HEIGHT}" class="lane"/>')
        total = sum(spent.values())
        x, width = (began - first) * scale, max((ended - began) * scale, 2.0)
        for account, seconds in spent.items():
            length = width * seconds / total if total else 0.0
            words = escape(f"{name}: {names[account]}, {seconds / total:.1%} of its time") if total else ""
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{length:.2f}" height="{ROW_HEIGHT}" class="c{colours[account]}">'
                f"<title>{words}</title></rect>"
            )
            x += length
    ends = "".join(f"<span>{escape(_when(moment))}</span>" for moment in (first, last))
    keys = [
        Key(names[name], f"c{colour}") for name, colour in colours.items() if any(row[3].get(name) for row in shown)
    ]
    return "\n".join([legend(keys), f'<div class="bar">{"".join(parts)}</svg><p class="pale">{ends}</p></div>'])


def account_bar(accounts: dict[str, float], colours: dict[str, int], names: dict[str, str], told: str) -> str:
    """One bar of all accounts."""
    total = sum(accounts.values())
    x, boxes = 0.0, []
    for name, colour in colours.items():
        length = LENGTH * accounts[name] / total if total else 0.0
        words = escape(f"{names[name]}: {accounts[name] / total:.1%}") if total else ""
        boxes.append(
            f'<rect x="{x:.2f}" y="0" width="{length:.2f}" height="20" class="c{colour}"><title>{words}</title></rect>'
        )
        x += length
    return (
        f'<div class="bar"><p><span>all of its time</span><strong>{escape(told)}</strong></p>'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LENGTH} 20" preserveAspectRatio="none" role="img" '
        f'aria-label="where time went">{"".join(boxes)}</svg></div>'
    )


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
