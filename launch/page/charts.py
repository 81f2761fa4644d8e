"""Pictures of a run: curves over steps, and attempts over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil, floor, log10

from .html import Key, escape, legend

WIDTH, HEIGHT = 520, 260
RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 20, 14, 50
AXIS_GAP, LETTER_WIDTH = 14, 8.5  # left of an axis: a gap, and a character of its numbers
MAX_POINTS = 400  # points of a curve: as many as a picture can show
MAX_ROWS = 60  # attempts that are drawn
ROW_HEIGHT, GAP, LENGTH = 14, 5, 1000
MIN_VALUE, MAX_VALUE = 1e-100, 1e100  # smallest value that differs from 0, and largest that an axis can show
Point = tuple[float, float]


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


def curve_chart(title: str, unit: Callable[[float], str], curves: Sequence[tuple[str, Sequence[Point], int]]) -> str:
    """Curves over steps. unit: the text of a value. curves: name, points and the number of a colour."""
    drawn = [(name, thinned(points), colour) for name, points, colour in curves]
    drawn = [(name, points, colour) for name, points, colour in drawn if points]
    if not drawn:
        return ""
    values = sorted(value for _, points, _ in drawn for _, value in points)
    low, high = _range(values)
    marks = _marks(low, high, 4)
    left = AXIS_GAP + LETTER_WIDTH * max(len(unit(mark)) for mark in marks)
    steps = [step for _, points, _ in drawn for step, _ in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def across(step: float) -> float:
        return left + (WIDTH - RIGHT_MARGIN - left) * (step - first) / (last - first)

    def up(value: float) -> float:
        held = min(max(value, low), high)
        return (HEIGHT - BOTTOM_MARGIN) + (TOP_MARGIN - HEIGHT + BOTTOM_MARGIN) * (held - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
    ]
    for mark in marks:
        y = up(mark)
        parts.append(f'<line x1="{left:.1f}" x2="{WIDTH - RIGHT_MARGIN}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(left - 6, y + 4, unit(mark), "end"))
    free = left  # where the next number may begin
    for mark in _marks(first, last, 4, whole=True):
        if across(mark) >= free:
            free = across(mark) + 90
            anchor = "end" if across(mark) > WIDTH - 70 else "middle" if across(mark) > left + 30 else "start"
            parts.append(_text(across(mark), HEIGHT - BOTTOM_MARGIN + 20, f"{mark:,.0f}", anchor))
    parts.append(_text((left + WIDTH - RIGHT_MARGIN) / 2, HEIGHT - 8, "step", "middle"))
    for name, points, colour in drawn:
        path = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in points)
        words = escape(f"{name}: {unit(points[-1][1])} at step {points[-1][0]:,.0f}")
        if len(points) == 1:
            parts.append(f'<circle cx="{path.split(",")[0]}" cy="{path.split(",")[1]}" r="4" class="c{colour}"/>')
        parts.append(f'<polyline points="{path}" class="curve s{colour}"><title>{words}</title></polyline>')
    return "\n".join([*parts, "</svg>", legend(Key(name, f"c{colour}") for name, _, colour in drawn)])


def _range(values: Sequence[float]) -> Point:
    """Lowest and highest value that is shown: without the few that would press all others flat."""
    low, high = values[0], values[-1]
    usual = values[floor(0.98 * (len(values) - 1))]
    if len(values) >= 20 and high - low > 5 * (usual - low) > 0:
        high = low + 2 * (usual - low)
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def _marks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round values from `low` to `high`."""
    rough = (high - low) / about
    power = 10.0 ** floor(log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    return [step * at for at in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


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


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
