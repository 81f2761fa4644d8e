"""One picture of a report: drawn once, and written as SVG inside of a page, as PNG and as CSV."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.experiment.folder import csv_text
from megalite.report.pictures import plain, pyplot
from megalite_launch.page.html import escape
from megalite_launch.page.style import COLOURS

INK, GREY, LINE, PAPER = "#1f2933", "#5d6b78", "#cdd4db", "#ffffff"
VARIABLES = {INK: "var(--ink)", GREY: "var(--pale)", LINE: "var(--line)", PAPER: "var(--paper)"}
RAMP = ("#3f72b8", "#27a3a3", "#4f9e63", "#b5a02c", "#df8a1f", "#c9473f")  # colours of ordered series, in both schemes
MARK = "#c9473f"
MAX_SERIES = 10  # in a legend; those between are left out of it
DPI = 150  # pixels per inch of a PNG
RC_SETTINGS: Any = {
    "axes.edgecolor": GREY,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "figure.facecolor": PAPER,
    "font.size": 9.5,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "megalite",
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True)
class Picture:
    """name: of its files. told: a sentence below it. header, rows: the numbers that it shows. paint: draws a figure."""

    name: str
    title: str
    told: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    paint: Callable[[Any], None]
    size: tuple[float, float] = (6.4, 3.9)


@dataclass(frozen=True)
class Drawn:
    """The same picture as text of HTML, and as the contents of files."""

    picture: Picture
    svg: str
    png: bytes
    table: str


def drawn(picture: Picture) -> Drawn:
    """Draw a picture."""
    with pyplot.rc_context(RC_SETTINGS):
        figure = pyplot.figure(figsize=picture.size, layout="constrained")
        try:
            picture.paint(figure)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # the place of everything is known, and need not be worked out twice
            vector, raster = io.StringIO(), io.BytesIO()
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(vector, format="svg", transparent=True, metadata=nothing)
            figure.savefig(raster, format="png", dpi=DPI)
        finally:
            pyplot.close(figure)
    return Drawn(
        picture, inline(vector.getvalue(), picture), raster.getvalue(), csv_text([picture.header, *picture.rows])
    )


def inline(svg: str, picture: Picture) -> str:
    """SVG of matplotlib as a part of a page: colours follow its scheme, fonts are its own, and names occur once."""
    start = svg.index("<svg")
    head, body = svg[start:].split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head)
    assert box is not None
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{picture.name}-\1"', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{picture.name}-", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", body)
    body = re.sub(r"font: (italic|bold|\d+) ([\d.]+px) [^;\"]+", r"font-size: \2", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    width = box[1].split()[2]
    return (
        f'<svg class="plot" viewBox="{box[1]}" style="max-width: {float(width) * 1.45:.0f}px" role="img" '
        f'aria-label="{escape(picture.title)}">{body}'
    )


def colours(count: int) -> list[str]:
    """Colours of `count` series that have an order."""
    if count <= 1:
        return [RAMP[0]] * count
    found = []
    for at in range(count):
        place = at * (len(RAMP) - 1) / (count - 1)
        low = min(int(place), len(RAMP) - 2)
        pair = [[int(RAMP[low + side][i : i + 2], 16) for i in (1, 3, 5)] for side in (0, 1)]
        mixed = [round(a + (b - a) * (place - low)) for a, b in zip(*pair, strict=True)]
        found.append("#" + "".join(f"{each:02x}" for each in mixed))
    return found


def kinds(count: int) -> list[str]:
    """Colours of `count` series that have no order."""
    return [COLOURS[at % len(COLOURS)] for at in range(count)]


def in_legend(count: int) -> set[int]:
    """Places of the series, among `count`, that a legend names: all, or some between the first and the last."""
    if count <= MAX_SERIES:
        return set(range(count))
    return {round(at * (count - 1) / (MAX_SERIES - 1)) for at in range(MAX_SERIES)}


def beside(axes: Any, **more: Any) -> None:
    """A legend to the right of the axes, where it hides nothing."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, **more)


def label(text: str, most: int = 34) -> str:
    """Text of users for a legend."""
    return plain(text if len(text) <= most else text[: most - 1] + "…")
