"""Stacked bars: what a step's time and a GPU's memory go to, for one layout below the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megalite_launch.page.html import Key, escape, legend, table

LENGTH, HEIGHT = 1000.0, 20  # size of a picture in its own units; a page stretches it to its width
LINE_WIDTH = 3.0  # a line across
ROOM_FACTOR = 1.01  # times the longest bar, so that a line at its end is seen whole
MIN_SHARE = 1e-4  # share of the longest bar: a part that is shorter in every bar is not shown anywhere


@dataclass(frozen=True)
class Bar:
    """One bar. value: its sum in words. parts: by the name of their key. interval: its ends, where there is one."""

    name: str
    value: str
    parts: Mapping[str, float]
    interval: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def stacked(
    bars: Sequence[Bar],
    keys: Sequence[Key],
    number: Callable[[float], str],
    limit: tuple[str, float] | None = None,
) -> str:
    """Bars on one scale, their legend, and a table of their numbers, as HTML.

    keys: of the parts, in their order. number: the text of a part. limit: name and value of a line across all bars.
    """
    longest = max(max(bar.total, bar.interval[1] if bar.interval else 0.0) for bar in bars)
    longest = max(longest, limit[1] if limit else 0.0) * ROOM_FACTOR
    shown = [key for key in keys if any(bar.parts[key.name] > MIN_SHARE * longest for bar in bars)]
    entries = [*shown, Key(f"{limit[0]}: {number(limit[1])}", "limit")] if limit else shown
    pictures = [_bar(bar, shown, LENGTH / longest, limit, number) for bar in bars]
    header = ["", *(str(at) for at in range(1, len(bars) + 1))]
    rows: list[list[str | Key]] = [
        [key, *(number(bar.parts[key.name]) if bar.parts[key.name] else "–" for bar in bars)] for key in shown
    ]
    rows.append(["all", *(number(bar.total) for bar in bars)])
    return "\n".join([legend(entries), *pictures, table(header, rows)])


def _bar(
    bar: Bar,
    keys: Sequence[Key],
    scale: float,
    limit: tuple[str, float] | None,
    number: Callable[[float], str],
) -> str:
    x, boxes = 0.0, []
    for key in keys:
        length = bar.parts[key.name] * scale
        boxes.append(_box(x, 0, length, HEIGHT, key.colour, f"{key.name}: {number(bar.parts[key.name])}"))
        x += length
    if bar.interval:
        low, high = bar.interval
        words = f"interval: {number(low)} to {number(high)}"
        boxes.append(_box(low * scale, HEIGHT / 2 - 1, (high - low) * scale, 2, "whisker", words))
        boxes += [
            _box(end * scale - LINE_WIDTH / 2, HEIGHT / 4, LINE_WIDTH, HEIGHT / 2, "whisker", words)
            for end in (low, high)
        ]
    if limit:
        boxes.append(_box(limit[1] * scale, 0, LINE_WIDTH, HEIGHT, "limit", f"{limit[0]}: {number(limit[1])}"))
    words = escape(f"{bar.name}: {bar.value}")
    return (
        f'<div class="bar"><p><span>{escape(bar.name)}</span><strong>{escape(bar.value)}</strong></p>'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LENGTH:g} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{words}">{"".join(boxes)}</svg></div>'
    )


def _box(x: float, y: float, width: float, height: float, of: str, words: str) -> str:
    return (
        f'<rect x="{x:.3f}" y="{y:g}" width="{width:.3f}" height="{height:g}" class="{of}">'
        f"<title>{escape(words)}</title></rect>"
    )
