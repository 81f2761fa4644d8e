"""What commands print for people: tables, as wide as the terminal, and numbers with units."""

import sys

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from megalite.output import UNBOUNDED

DECIMAL = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))


def console() -> Console:
    """Of stdout. It prints texts as they are, without markup."""
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else UNBOUNDED)


def table(*columns: str, text: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns named in `text` are aligned left, the others are numbers."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in text else "right")
    return made


def sections(on: Console, parts: list[tuple[str, RenderableType]]) -> None:
    """Print each part under its heading, with an empty line between them."""
    for number, (heading, body) in enumerate(parts):
        if number:
            on.print()
        on.print(Text(heading, style="bold"))
        on.print(body)


def scaled(value: float, unit: str, prefixes: tuple[tuple[float, str], ...] = DECIMAL) -> str:
    """A number of units to three digits, with a prefix: `42.6 MFLOP/s`, or with BINARY ones `51.2 GiB`."""
    size, prefix = next(((size, prefix) for size, prefix in prefixes if value >= 0.9995 * size), (1.0, ""))
    number = value / size
    if number >= 999.5 or (isinstance(value, int) and not prefix):
        return f"{number:,.0f} {prefix}{unit}"
    return f"{number:#.3g}".rstrip(".") + f" {prefix}{unit}"


def memory(size: int) -> str:
    """Bytes of memory: `51.2 GiB`."""
    return scaled(size, "B", BINARY)
