"""Line charts with labelled axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from .html import Key, escape, legend

WIDTH, HEIGHT = 520, 310
RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 24, 16, 56
NAME_WIDTH, AXIS_GAP, LETTER_WIDTH = 26, 14, 8.5  # left of an axis: its name, a gap, and a character of its numbers
LABEL_HEIGHT, LABEL_GAP = 15, 10
Scale = Callable[[float], float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points joined by a line, in the order of x. colour: a number of `style.COLOURS`. labels: beside the points.

    ideal: a thin broken line without points. dots: whether every point is marked, or the line alone is drawn.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    labels: Sequence[str] = ()
    ideal: bool = False
    dots: bool = True


@dataclass(frozen=True)
class Axis:
    """Axis of a diagram. It begins at 0 unless it is logarithmic or `near`.

    logarithmic: equal ratios are equally far apart. near: it spans the values alone, without the few that would press
    all others flat. marks: values that stand beside it; None: round ones, at least `mark_step` apart.
    """

    name: str
    text: Callable[[float], str]
    logarithmic: bool = False
    marks: Sequence[float] | None = None
    near: bool = False
    mark_step: float = 0.0


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line], upright: Sequence[tuple[float, str]] = ()) -> str:
    """A picture and its legend. upright: values of x at which a broken line stands, and what happened there."""
    points = [point for line in lines for point in line.points]
    up, y_marks = _scale(y, [each for _, each in points], HEIGHT - BOTTOM_MARGIN, TOP_MARGIN)
    first = (NAME_WIDTH if y.name else 0) + AXIS_GAP + LETTER_WIDTH * max(len(y.text(mark)) for mark in y_marks)
    across, x_marks = _scale(x, [each for each, _ in points], first, WIDTH - RIGHT_MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
    ]
    for mark in y_marks:
        parts.append(
            f'<line x1="{first:.1f}" x2="{WIDTH - RIGHT_MARGIN}" y1="{up(mark):.1f}" y2="{up(mark):.1f}" class="grid"/>'
        )
        parts.append(_text(first - 8, up(mark) + 4, y.text(mark), "end"))
    free = 0.0  # where the next number may begin
    for mark in x_marks:
        at, half = across(mark), LETTER_WIDTH * len(x.text(mark)) / 2
        middle = min(max(at, half), WIDTH - half)
        if middle - half >= free:
            free = middle + half + LABEL_GAP
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{HEIGHT - BOTTOM_MARGIN}" '
                f'y2="{HEIGHT - BOTTOM_MARGIN + 5}" class="grid"/>'
            )
            parts.append(_text(middle, HEIGHT - BOTTOM_MARGIN + 20, x.text(mark), "middle"))
    parts.append(_text((first + WIDTH - RIGHT_MARGIN) / 2, HEIGHT - 10, x.name, "middle"))
    if y.name:
        middle = (TOP_MARGIN + HEIGHT - BOTTOM_MARGIN) / 2
        parts.append(_text(16, middle, y.name, "middle", f' transform="rotate(-90 16 {middle:.1f})"'))
    ends = min(each for each, _ in points), max(each for each, _ in points)
    standing = [(at, words) for at, words in upright if ends[0] <= at <= ends[1]]
    for at, words in standing:
        parts.append(
            f'<line x1="{across(at):.1f}" x2="{across(at):.1f}" y1="{TOP_MARGIN}" y2="{HEIGHT - BOTTOM_MARGIN}" '
            f'class="ideal"><title>{escape(f"{words} at {x.name} {x.text(at)}")}</title></line>'
        )
    taken: list[Box] = []
    for line in sorted(lines, key=lambda line: not line.ideal):
        parts += _drawn(line, across, up, x, y, taken)
    keys = [Key(line.name, f"c{line.colour}") for line in lines if not line.ideal]
    ideal = [f"broken line: {line.name}" for line in lines if line.ideal]
    ideal += [f"broken upright line: {words}" for words in dict.fromkeys(words for _, words in standing)]
    told = f'<p class="pale">{escape("; ".join(ideal))}</p>' if ideal else ""
    return "\n".join([*parts, "</svg>", legend(keys), told])


def _drawn(line: Line, across: Scale, up: Scale, x: Axis, y: Axis, taken: list[Box]) -> list[str]:
    """A line with its points and labels. taken: where labels are; one is left out where it would cover another."""
    places = [(across(a), up(b)) for a, b in line.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    if line.ideal:
        return [f'<polyline points="{path}" class="curve ideal"/>']
    last = escape(f"{line.name}: {y.text(line.points[-1][1])} at {x.name} {x.text(line.points[-1][0])}")
    parts = [f'<polyline points="{path}" class="curve s{line.colour}"><title>{last}</title></polyline>']
    for (a, b), point in zip(places, line.points if line.dots or len(places) == 1 else ()):
        words = escape(f"{line.name}: {x.text(point[0])} {x.name}, {y.text(point[1])}")
        parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" class="c{line.colour}"><title>{words}</title></circle>')
    for (a, b), label in zip(places, line.labels):
        long = LETTER_WIDTH * len(label)
        for at, below, anchor in ((a + 8, b - 7, "start"), (a - 8, b + 19, "end")):
            first = at if anchor == "start" else at - long
            box = first, below - LABEL_HEIGHT, first + long, below
            if first >= 0 and box[2] <= WIDTH and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                parts.append(_text(at, below, label, anchor))
                break
    return parts


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _scale(axis: Axis, values: Sequence[float], first: float, last: float) -> tuple[Scale, Sequence[float]]:
    """Return the function that places a value between the pixels `first` and `last`, and the values that are marked."""
    least, most = min(values), max(values)
    if axis.logarithmic:
        least, most = least / 1.12, most * 1.12
        marks = axis.marks or [mark for mark in _steps(least, most) if least <= mark <= most]
        span = log10(most / least)
        return lambda value: first + (last - first) * log10(value / least) / span, marks
    least, most = _near(sorted(values)) if axis.near else (0.0, most if most > 0 else 1.0)
    step = max(_round_step((most - least) / 4), axis.mark_step)
    if not axis.near:
        most = step * ceil(most / step - 1e-9)
    marks = axis.marks or [step * at for at in range(ceil(least / step - 1e-9), floor(most / step + 1e-9) + 1)]
    return lambda value: first + (last - first) * (min(max(value, least), most) - least) / (most - least), marks


def _near(values: Sequence[float]) -> Point:
    """The ends of an axis for ascending `values`, with a margin; without the few high ones that would press the rest
    flat."""
    low, high = values[0], values[-1]
    usual = values[floor(0.98 * (len(values) - 1))]
    if len(values) >= 20 and high - low > 5 * (usual - low) > 0:
        high = low + 2 * (usual - low)
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def _steps(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten; for a short range, more of them."""
    digits = (1, 2, 5) if most / least > 4 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    return [digit * 10.0**power for power in range(floor(log10(least)), ceil(log10(most)) + 1) for digit in digits]


def _round_step(rough: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** floor(log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
