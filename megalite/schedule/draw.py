"""Pictures of a simulated schedule: a timeline of text for terminals, and one of SVG.

The colour of compute stands for the virtual stage of its rank, the shade for the kind. Letters, the numbers of the
micro-batches and, in SVG, a tooltip say the same without colour. In text, every second stage of a rank has small
letters.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import floor

from rich.text import Text

from megalite.base.errors import counted, number_ranges
from megalite.schedule.actions import COMPUTE, OTHER_SIDE, SENDS_BY_KIND, SHARDING, Kind, Table
from megalite.schedule.simulate import Span, Time, Timeline
from megalite_launch.page.html import escape

INK, GREY, GROUND, WHITE = "#1f2933", "#616e7c", "#eef1f4", "#ffffff"
SHADES = (Kind.F, Kind.I, Kind.B, Kind.W)  # from light to dark
FAMILIES = (  # a virtual stage each; told apart under every kind of colour blindness, the first ones best
    ("#a6bbfb", "#7690e1", "#5066b3", "#2f4082"),
    ("#f0b152", "#c5870e", "#90620e", "#604006"),
    ("#d8efc8", "#a8c694", "#7f9b6a", "#5a7148"),
    ("#cf93b6", "#af6391", "#833b68", "#561941"),
    ("#9b9afe", "#7365f2", "#5038c2", "#310a8b"),
    ("#ddd0fd", "#b6a1e2", "#8b77b5", "#635286"),
    ("#ffcf61", "#d6a300", "#a27b14", "#735605"),
    ("#8fdabd", "#47b58f", "#198968", "#035e45"),
)
TRANSFER_COLOUR, SHARDING_COLOUR = "#7b4fb5", "#c2477f"  # colours
MEANING = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "gradient of the input",
    Kind.W: "gradient of the weights",
    Kind.SEND_F: "output sent",
    Kind.RECV_F: "input received",
    Kind.SEND_B: "gradient of the input sent",
    Kind.RECV_B: "gradient of the output received",
    Kind.GATHER: "weights gathered",
    Kind.RESHARD: "weights freed",
    Kind.REDUCE: "gradients reduced",
}
PEAK = "peak: most stage-activations held at once"
IDLE_MARK = "·"
LEGEND_GAP = "   "  # entries of the text's legend

# Lengths of the SVG, in pixels.
MARGIN, LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 16, 60, 150, 46, 18
BOX, STRIP, GAP = 24, 7, 7  # heights in a lane: compute, communication below it, and the space to the next
WIDTH, MAX_UNIT = 1100, 26  # width of all lanes where numbers have room in that, and of the shortest compute at most
TICK, SWATCH, LINE = 2, 16, 22  # communication that takes no time; a colour of the legend; the height of its lines
FONT, MIN_FONT, DIGIT, LETTER = 12, 9, 0.56, 0.52  # sizes of a font, and widths of characters as shares of one
TITLE, BOLD_LETTER = 16, 0.62  # the same of the title
PADDING = 3  # space that a number leaves in its box, on both sides together
MAX_SPREAD = 16  # compute that is this many times shorter than the longest has no room of its own

Shade = tuple[Kind, int]  # kind of compute, and which of its rank's stages it is on, counted from 0


def title(table: Table, timeline: Timeline) -> str:
    """The title: `zbv: p = 4 ranks, v = 2 stages per rank, m = 8 micro-batches, bubble 5.9%, makespan 51`."""
    return f"{size_text(table)}, bubble {float(timeline.bubble):.1%}, makespan {float(timeline.makespan):g}"


def size_text(table: Table) -> str:
    """The beginning of the title: `zbv: p = 4 ranks, v = 2 stages per rank, m = 8 micro-batches`."""
    stages = table.stages / table.ranks
    return (
        f"{table.name}: p = {counted(table.ranks, 'rank')}, v = {counted(stages, 'stage')} per rank, "
        f"m = {counted(table.micro_batches, 'micro-batch', 'micro-batches')}"
    )


def draw_text(table: Table, timeline: Timeline, width: int) -> Text:
    """One line per rank, at most `width` columns wide: its compute, its bubble and its peak of activations.

    Compute is shown as kind and micro-batch, or as the kind alone where there is no room for more. A timeline that is
    too long even for single letters is cut, and a line says so. A legend follows.
    """
    local = _local(table)
    label, ends = f"rank {table.ranks - 1} ", [_summary(timeline, rank) for rank in range(table.ranks)]
    room = max(1, width - len(label) - 1 - max(map(len, ends)))
    longest, shortest = float(timeline.makespan), float(_shortest(timeline))
    spacious = len(f"F{table.micro_batches - 1}") + 1  # columns of the shortest compute
    scale = max(1, min(spacious, floor(room * shortest / longest))) / shortest
    columns = min(room, round(longest * scale))
    picture = Text(no_wrap=True)
    for rank, end in enumerate(ends):
        lane, column = Text(f"rank {rank}".ljust(len(label))), 0
        for span in _compute(timeline, rank):
            start, stop = round(float(span.start) * scale), round(float(span.end) * scale)
            kind, stage, micro = span.action
            shade = kind, local[stage]
            letter = _letter(shade)
            name = f"{letter}{micro}"
            cell = name.ljust(stop - start) if len(name) <= stop - start else letter * (stop - start)
            lane.append(IDLE_MARK * (start - column), style="dim").append(cell, style=_style(shade))
            column = stop
        lane.append(IDLE_MARK * (columns - column), style="dim")
        lane.truncate(len(label) + columns)
        picture.append(lane).append(f" {end}\n")
    if columns < round(longest * scale):
        picture.append(f"cut after {columns / scale:g} of {longest:g} units of time: a picture (.svg) has all\n")
    return picture.append(_text_legend(table, timeline, width))


def draw_svg(
    table: Table, timeline: Timeline, heading: str | None = None, below: Mapping[str, Timeline] | None = None
) -> str:
    """An SVG with a lane per rank: compute with its micro-batch, and communication in a strip below.

    It is as wide as the numbers need. Everything in it has a tooltip with its action and time; the legend explains the
    colours. heading: None for `title`. below: other timelines of the same actions by name, each drawn below every rank.
    """
    heading = title(table, timeline) if heading is None else heading
    others = below or {}
    longest = max(float(each.makespan) for each in (timeline, *others.values()))
    shortest = float(_shortest(timeline))
    left = _left(table, others)
    digits = len(str(table.micro_batches - 1))
    narrowest = MIN_FONT * DIGIT * digits + PADDING
    unit = min(MAX_UNIT, max(narrowest, WIDTH * shortest / longest))
    font = min(FONT, (unit - PADDING) / (DIGIT * digits))
    scale, lane = unit / shortest, BOX + STRIP + GAP
    width = round(max(left + longest * scale + RIGHT_MARGIN, 2 * MARGIN + TITLE * BOLD_LETTER * len(heading)))
    lanes = [(rank, *each) for rank in range(table.ranks) for each in ((f"rank {rank}", timeline), *others.items())]
    legend, lines = _svg_legend(table, timeline, TOP_MARGIN + lane * len(lanes) + 8, width)
    height = TOP_MARGIN + lane * len(lanes) + lines * LINE + BOTTOM_MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT}">',
        f"<title>{escape(heading)}</title>",
        f'<rect width="{width}" height="{height}" fill="{WHITE}"/>',
        _label(MARGIN, 28, heading, INK, f'font-size="{TITLE}" font-weight="bold"'),
    ]
    for number, (rank, name, each) in enumerate(lanes):
        top, colour = TOP_MARGIN + number * lane, INK if each is timeline else GREY
        parts.append(_label(MARGIN, top + BOX / 2 + 4, name, colour))
        parts.append(_label(left + longest * scale + 10, top + BOX / 2 + 4, _summary(each, rank), GREY))
        parts.append(_box(left, top, longest * scale, BOX, GROUND))
        parts += _lane(table, each, rank, left, top, scale, font)
    return "\n".join([*parts, *legend, "</svg>", ""])


def _lane(
    table: Table, timeline: Timeline, rank: int, left: float, top: int, scale: float, font: float
) -> Iterator[str]:
    """The actions of a rank in their lane, which begins at (`left`, `top`)."""
    local = _local(table)
    for span in timeline.spans[rank]:
        kind, stage, micro = action = span.action
        x, length = left + float(span.start) * scale, float(span.end - span.start) * scale
        drawn = []
        if action.is_compute:
            shade = kind, local[stage]
            drawn.append(_box(x, top, length, BOX, _fill(shade), f'stroke="{WHITE}" stroke-width="0.8"'))
            how = f'text-anchor="middle" font-size="{font:.1f}"'
            if length >= font * DIGIT:
                drawn.append(_label(x + length / 2, top + BOX / 2 + font / 3, str(micro), _ink(shade), how))
        else:
            half = STRIP / 2 if action.is_transfer else STRIP
            below = half if action.is_transfer and kind not in SENDS_BY_KIND.values() else 0
            colour = TRANSFER_COLOUR if action.is_transfer else SHARDING_COLOUR
            drawn.append(_box(x - TICK / 2, top + BOX + 1 + below, max(TICK, length), half, colour))
        yield f"<g><title>{_tooltip(span)}</title>{''.join(drawn)}</g>"


def _left(table: Table, others: Iterable[str]) -> float:
    """The x at which lanes begin, to the right of the names of their ranks and of other timelines."""
    names = max((MARGIN + FONT * LETTER * (len(name) + 1) for name in others), default=0.0)
    return max(names, LEFT_MARGIN + FONT * DIGIT * (len(str(table.ranks - 1)) - 1))


def _svg_legend(table: Table, timeline: Timeline, top: float, width: int) -> tuple[list[str], int]:
    """The colours and letters that occur and what they mean, and how many lines that takes."""
    x, line, parts = float(LEFT_MARGIN), 0, []

    def entry(swatches: list[tuple[str, str, str]], text: str) -> None:
        nonlocal x, line
        length = SWATCH * len(swatches) + 6 + FONT * LETTER * len(text) + 22
        if x > LEFT_MARGIN and x + length > width:
            x, line = LEFT_MARGIN, line + 1
        y = top + line * LINE
        for number, (colour, ink, letter) in enumerate(swatches):
            parts.append(_box(x + number * SWATCH, y, SWATCH, SWATCH, colour))
            parts.append(_label(x + (number + 0.5) * SWATCH, y + 12, letter, ink, 'text-anchor="middle"'))
        parts.append(_label(x + SWATCH * len(swatches) + 6 * bool(swatches), y + 12, text, INK))
        x += length

    for shades, stages in _families(table, timeline):
        entry([(_fill(shade), _ink(shade), str(shade[0])) for shade in shades], stages)
    for colour, text in _others(timeline):
        entry([(colour, INK, "")], text)
    x, line = LEFT_MARGIN, line + 1
    for text in _letters(timeline):
        entry([], text)
    return parts, line + 1


def _text_legend(table: Table, timeline: Timeline, width: int) -> Text:
    """The legend for a terminal, whose timeline shows no communication."""
    entries = []
    for shades, stages in _families(table, timeline):
        swatches = Text.assemble(*((_letter(shade), _style(shade)) for shade in shades))
        entries.append(swatches.append(f" {stages}"))
    entries += [Text(text, style="dim") for text in _letters(timeline)]
    legend, used = Text(), 0
    for entry in entries:
        if used and used + len(LEGEND_GAP) + len(entry) > width:
            legend, used = legend.append("\n"), 0
        legend.append(LEGEND_GAP * bool(used)).append(entry)
        used += len(LEGEND_GAP) * bool(used) + len(entry)
    return legend


def _families(table: Table, timeline: Timeline) -> list[tuple[list[Shade], str]]:
    """Shades of every colour that occurs, and the stages that have the colour, such as `stages 0-3`."""
    local = _local(table)
    drawn = {(span.action.kind, local[span.action.stage]) for lane in timeline.spans for span in lane}
    found = []
    for family in sorted(set(local.values())):
        stages = [stage for stage, index in sorted(local.items()) if index == family]
        name = f"stage{'s' * (len(stages) > 1)} {number_ranges(stages)}"
        found.append(([(kind, family) for kind in SHADES if (kind, family) in drawn], name))
    return found


def _others(timeline: Timeline) -> list[tuple[str, str]]:
    """The other colours of the SVG that occur."""
    kinds = _kinds(timeline)
    entries = [(GROUND, "idle")]
    entries += (
        [(TRANSFER_COLOUR, "below compute: the upper half sends, the lower half receives")]
        if kinds & OTHER_SIDE.keys()
        else []
    )
    entries += (
        [(SHARDING_COLOUR, "weights gathered or freed, gradients reduced")] if kinds.intersection(SHARDING) else []
    )
    return entries


def _letters(timeline: Timeline) -> list[str]:
    """The meaning of the letters of the kinds, and of the summary of a rank."""
    return [*(f"{kind}: {MEANING[kind]}" for kind in COMPUTE if kind in _kinds(timeline)), PEAK]


def _kinds(timeline: Timeline) -> set[Kind]:
    return {span.action.kind for lane in timeline.spans for span in lane}


def _local(table: Table) -> dict[int, int]:
    """By stage: its number among the stages of its rank, from 0."""
    return {stage: index for rank in range(table.ranks) for index, stage in enumerate(table.stages_of(rank))}


def _compute(timeline: Timeline, rank: int) -> Iterator[Span]:
    return (span for span in timeline.spans[rank] if span.action.is_compute)


def _summary(timeline: Timeline, rank: int) -> str:
    return f"bubble {float(timeline.bubbles[rank]):.1%}, peak {timeline.peak_live[rank]}"


def _tooltip(span: Span) -> str:
    kind, stage, micro = span.action
    times = f"time {float(span.start):g} to {float(span.end):g}"
    return f"{kind}: {MEANING[kind]}, stage {stage}, micro-batch {micro}, {times}"


def _shortest(timeline: Timeline) -> Time:
    """The length of the shortest compute that is to be seen: what takes next to no time is left out."""
    lengths = [span.end - span.start for rank in range(len(timeline.spans)) for span in _compute(timeline, rank)]
    return min((length for length in lengths if MAX_SPREAD * length >= max(lengths) > 0), default=1)


def _fill(shade: Shade) -> str:
    kind, family = shade
    return FAMILIES[family % len(FAMILIES)][SHADES.index(kind)]


def _ink(shade: Shade) -> str:
    """The one of the two inks that can be read on a shade, by its brightness."""
    red, green, blue = (int(_fill(shade)[at : at + 2], 16) for at in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else WHITE


def _letter(shade: Shade) -> str:
    """The letter of a shade in text, where colours may be missing."""
    kind, family = shade
    return kind.lower() if family % 2 else str(kind)


def _style(shade: Shade) -> str:
    return f"{_ink(shade)} on {_fill(shade)}"


def _box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" {more}/>'


def _label(x: float, y: float, text: str, fill: str, more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" fill="{fill}" {more}>{escape(text)}</text>'
