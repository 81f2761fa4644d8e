"""Tables for a terminal, as HTML."""

from rich.table import Table

from megalite_launch.page.html import table


def as_html(shown: Table) -> str:
    """A table that was made for a terminal."""
    header = [str(column.header) for column in shown.columns]
    rows = zip(*([_indented(str(cell)) for cell in column.cells] for column in shown.columns), strict=True)
    return table(header, rows, [at for at, column in enumerate(shown.columns) if column.justify == "left"])


def _indented(text: str) -> str:
    """A text whose leading spaces a browser keeps."""
    return "\u2003" * (len(text) - len(text.lstrip())) + text.lstrip()
