"""Output of the programs: tables and lines on stdout, progress on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from megalite.base.errors import printable
from megalite.base.terminal import console, escaping, table


class Terminal:
    """Prints to stdout; with `quiet`, prints nothing. Characters that could disturb a terminal are escaped."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = console()
        self._console.quiet = quiet

    def line(self, text: str) -> None:
        self.text(printable(text))

    def text(self, text: str) -> None:
        """Print lines as they are."""
        self._print(Text(text), soft_wrap=True)

    def styled(self, parts: Iterable[tuple[str, str]]) -> None:
        """Print one line of parts, each with its style."""
        self._print(Text.assemble(*((printable(text), style) for text, style in parts)), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], marked: Iterable[int] = ()) -> None:
        """Print a table. A column is text, aligned left and wrapped, if its name ends in a colon, which is not shown.

        marked: rows to show in red.
        """
        names = [column.removesuffix(":") for column in columns]
        shown = table(*names, text=tuple(column[:-1] for column in columns if column.endswith(":")))
        red = set(marked)
        for number, row in enumerate(rows):
            shown.add_row(*map(printable, row), style="red" if number in red else None)
        self._print(shown)

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        shown = Table(box=None, show_header=False)
        for name, value in facts:
            shown.add_row(name, printable(value))
        self._print(shown)

    def _print(self, shown: RenderableType, soft_wrap: bool = False) -> None:
        self._console.print(shown, soft_wrap=soft_wrap)


def print_warning(command: str, text: str) -> None:
    """Print a warning of a command on stderr, as one line."""
    print(f"{command}: warning: {printable(text)}", file=sys.stderr)


@contextmanager
def bar(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on stderr, if that is a terminal. Yields a function that takes numbers of bytes done."""
    told = escaping(Console(stderr=True))
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=told, transient=True, disable=not told.is_terminal) as progress:
        yield partial(progress.advance, progress.add_task(doing, total=total))
