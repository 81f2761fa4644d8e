"""Output of commands for people: tables, as wide as the terminal, and bytes."""

import sys
from math import ceil, floor, log10

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.table import Table
from rich.text import Text

from megalite.base.output import UNBOUNDED_WIDTH
from megalite_launch.base.texts import escaped

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))  # units of memory in tables, and their bytes


class _Escaped:
    """Text as it is printed, with codes in place of characters that could disturb a terminal."""

    def __init__(self, shown: RenderableType) -> None:
        self.shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self.shown, options):
            yield part if part.control else part._replace(text=escaped(part.text))


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(shown) for shown in renderables]


def escaping(on: Console) -> Console:
    """The same console, which from now on escapes what texts of files may have in them."""
    on.push_render_hook(_Escaping())
    return on


def console() -> Console:
    """Console on stdout. It prints texts without markup, and escapes what could disturb a terminal."""
    return escaping(Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else UNBOUNDED_WIDTH))


def table(*columns: str, text: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns named in `text` are aligned left and wrapped, the others are numbers."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        words = column in text
        made.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    return made


def sections(on: Console, parts: list[tuple[str, RenderableType]]) -> None:
    """Print each part under its heading, with an empty line between them."""
    for number, (heading, body) in enumerate(parts):
        if number:
            on.print()
        on.print(Text(heading, style="bold"))
        on.print(body)


def gib_above(size: float) -> str:
    """The least GiB, a number of three digits, that are at least so many bytes: for a key that is too small."""
    gib = size / UNITS[0][1]
    step = 10.0 ** (floor(log10(gib)) - 2)
    return f"{ceil(gib / step * (1 - 1e-12)) * step:.12g}"


def memory_unit(size: float) -> tuple[str, int]:
    """The largest unit of which `size` has at least two, for a whole table: its name and its bytes."""
    return next((unit for unit in UNITS if size >= 2 * unit[1]), UNITS[-1])
