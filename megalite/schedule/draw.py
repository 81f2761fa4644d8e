"""Pictures of a simulated schedule: a timeline of text for terminals, and one of SVG."""

from collections.abc import Iterator
from functools import cache
from html import escape
from math import floor

from rich.text import Text

from megalite.schedule.actions import COMPUTE, OTHER_SIDE, SENT_BY, Kind, Table
from megalite.schedule.actions import SHARDING as SHARDED
from megalite.schedule.simulate import Span, Time, Timeline

INK, PALE, GROUND = "#1f2933", "#616e7c", "#eef1f4"
FILL = {Kind.F: "#3d7ebf", Kind.B: "#2f9e6e", Kind.I: "#62b98f", Kind.W: "#e0a13a"}
TRANSFER, SHARDING = "#7b4fb5", "#c2477f"
MEANING = {Kind.F: "forward", Kind.B: "backward", Kind.I: "gradient of the input", Kind.W: "gradient of the weights"}
PEAK = "peak: most stage-activations held at once"
IDLE = "·"
TEXT_UNIT = 3.0  # columns of the shortest compute, where there is room

# Lengths of the SVG, in pixels.
MARGIN, LEFT, RIGHT, TOP, BOTTOM = 16, 60, 150, 46, 56
BOX, STRIP, GAP = 24, 7, 7  # of a lane: compute, communication below it, and the space to the next
WIDTH, UNIT_MIN, UNIT_MAX = 1100, 4, 26  # of all lanes, and of the shortest compute
TICK, DIGIT, LETTER = 2, 7, 6.2  # widths of communication that takes no time, and of characters


def title(table: Table, timeline: Timeline) -> str:
    """`zbv: ranks 4, stages 8, micro-batches 8, makespan 51, bubble 5.9%`."""
    return (
        f"{table.name}: ranks {table.ranks}, stages {table.stages}, micro-batches {table.micro_batches}, "
        f"makespan {float(timeline.makespan):g}, bubble {float(timeline.bubble):.1%}"
    )


def draw_text(timeline: Timeline, width: int) -> Text:
    """One line per rank, `width` columns at most: kind and micro-batch of every compute that has room, else its kind.

    A rank's stages alternate in brightness. At the end of a line stand the rank's bubble and peak of activations.
    """
    ends = [_summary(timeline, rank) for rank in range(len(timeline.spans))]
    label = len(f"rank {len(ends) - 1} ")
    room = max(1, width - label - 1 - max(map(len, ends)))
    scale = min(TEXT_UNIT / float(_shortest(timeline)), room / float(timeline.makespan))
    scale = floor(scale) or scale  # whole columns look alike
    picture = Text(no_wrap=True)
    for rank, end in enumerate(ends):
        picture.append(f"rank {rank}".ljust(label))
        column = 0
        for span, local in _compute(timeline, rank):
            start, stop = round(float(span.start) * scale), round(float(span.end) * scale)
            picture.append(IDLE * (start - column), style="dim")
            name = f"{span.action.kind}{span.action.micro}"
            # A name that touches the next cannot be told from it without colours.
            cell = name.ljust(stop - start) if len(name) < stop - start else str(span.action.kind) * (stop - start)
            picture.append(cell, style=f"{'white' if local % 2 else 'bold white'} on {_shade(span.action.kind, local)}")
            column = stop
        picture.append(IDLE * (round(float(timeline.makespan) * scale) - column), style="dim")
        picture.append(f" {end}\n")
    picture.append(PEAK, style="dim")
    return picture


def draw_svg(table: Table, timeline: Timeline) -> str:
    """An SVG with one lane per rank: compute with its micro-batch, and communication in a strip below.

    A rank's stages alternate in brightness.
    """
    longest = float(timeline.makespan)
    shortest = float(_shortest(timeline))
    scale = min(UNIT_MAX / shortest, max(UNIT_MIN / shortest, WIDTH / longest))
    lane = BOX + STRIP + GAP
    legend = _legend(timeline)
    width = LEFT + round(max(longest * scale + RIGHT, sum(map(_legend_width, legend))))
    height = TOP + lane * table.ranks + BOTTOM
    heading = title(table, timeline)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(heading)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _label(MARGIN, 28, heading, INK, 'font-size="16" font-weight="bold"'),
    ]
    for rank in range(table.ranks):
        parts += _lane(timeline, rank, TOP + rank * lane, scale, longest)
    x, baseline = float(LEFT), TOP + table.ranks * lane + 22
    for entry in legend:
        parts += [_box(x, baseline - 10, 12, 12, entry[0]), _label(x + 18, baseline, entry[1], INK)]
        x += _legend_width(entry)
    parts.append(_label(LEFT, baseline + 20, PEAK, PALE))
    return "\n".join([*parts, "</svg>", ""])


def _lane(timeline: Timeline, rank: int, top: int, scale: float, longest: float) -> Iterator[str]:
    baseline = top + BOX / 2 + 4
    yield _label(MARGIN, baseline, f"rank {rank}", INK)
    yield _label(LEFT + longest * scale + 10, baseline, _summary(timeline, rank), PALE)
    yield _box(LEFT, top, longest * scale, BOX, GROUND)
    for span, local in _compute(timeline, rank):
        x, length = LEFT + float(span.start) * scale, float(span.end - span.start) * scale
        yield _box(x, top, length, BOX, _shade(span.action.kind, local), 'stroke="white" stroke-width="0.8"')
        if DIGIT * len(str(span.action.micro)) + 2 <= length:
            yield _label(x + length / 2, baseline, str(span.action.micro), "white", 'text-anchor="middle"')
    for span in timeline.spans[rank]:
        if not span.action.is_compute:
            half = STRIP / 2 if span.action.is_transfer else STRIP
            below = half if span.action.is_transfer and span.action.kind not in SENT_BY.values() else 0
            length = max(TICK, float(span.end - span.start) * scale)
            colour = TRANSFER if span.action.is_transfer else SHARDING
            yield _box(LEFT + float(span.start) * scale - TICK / 2, top + BOX + 1 + below, length, half, colour)


def _legend(timeline: Timeline) -> list[tuple[str, str]]:
    """Colour and meaning of everything that is drawn."""
    kinds = {span.action.kind for rank in timeline.spans for span in rank}
    entries = [(FILL[kind], f"{kind}: {MEANING[kind]}") for kind in COMPUTE if kind in kinds]
    entries += [(TRANSFER, "sent (above), received")] if kinds & OTHER_SIDE.keys() else []
    entries += [(SHARDING, "weights gathered or freed, gradients reduced")] if kinds.intersection(SHARDED) else []
    return entries


def _legend_width(entry: tuple[str, str]) -> float:
    return 34 + LETTER * len(entry[1])


def _summary(timeline: Timeline, rank: int) -> str:
    return f"bubble {float(timeline.bubbles[rank]):.1%}, peak {timeline.peak_live[rank]}"


def _compute(timeline: Timeline, rank: int) -> Iterator[tuple[Span, int]]:
    """What a rank computes, and which of the rank's stages it is on, counted from 0."""
    spans = [span for span in timeline.spans[rank] if span.action.is_compute]
    stages = sorted({span.action.stage for span in spans})
    return ((span, stages.index(span.action.stage)) for span in spans)


def _shortest(timeline: Timeline) -> Time:
    """The length of the shortest compute that takes time."""
    lengths = [span.end - span.start for rank in timeline.spans for span in rank if span.action.is_compute]
    return min((length for length in lengths if length > 0), default=1)


@cache
def _shade(kind: Kind, local: int) -> str:
    """The kind's colour, darker on every second stage of a rank."""
    red, green, blue = (int(FILL[kind][at : at + 2], 16) for at in (1, 3, 5))
    dim = 0.68 if local % 2 else 1.0
    return f"#{round(red * dim):02x}{round(green * dim):02x}{round(blue * dim):02x}"


def _box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" {more}/>'


def _label(x: float, y: float, text: str, fill: str, more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" fill="{fill}" {more}>{escape(text)}</text>'
