"""Small pieces of HTML. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as escape_markup

from ..base.texts import escaped


@dataclass(frozen=True)
class Key:
    """One entry of a legend: its name, and the class of its colour in `style`."""

    name: str
    colour: str


def escape(text: str) -> str:
    """A text as a page shows it: neither markup, nor characters that could mislead a reader."""
    return escape_markup(escaped(text))


def paragraph(text: str, of: str = "") -> str:
    return f"<p{_class(of)}>{escape(text)}</p>"


def section(heading: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *parts, "</section>"])


def columns(*parts: str) -> str:
    """Parts beside each other where there is room."""
    return "\n".join(['<div class="columns">', *(f"<div>{part}</div>" for part in parts), "</div>"])


def figure(picture: str, width: int, caption: str) -> str:
    """A picture that is `width` pixels wide, or as wide as the page."""
    return f'<figure style="width: {width}px">{picture}<figcaption>{escape(caption)}</figcaption></figure>'


def wide(inner: str) -> str:
    """Wrap `inner` so that it scrolls sideways where it is wider than the page. The keyboard can scroll it, too."""
    return f'<div class="wide" tabindex="0">{inner}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str | Key]], text: Iterable[int] = (0,), of: str = "") -> str:
    """A table of a class. text: columns that are aligned left; the others hold numbers."""
    left = set(text)

    def line(cells: Sequence[str | Key], tag: str) -> str:
        inner = "".join(
            f"<{tag}{_class('text' if at in left else '')}>{_cell(cell)}</{tag}>" for at, cell in enumerate(cells)
        )
        return f"<tr>{inner}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return wide(f"<table{_class(of)}><thead>{line(header, 'th')}</thead><tbody>\n{body}\n</tbody></table>")


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Names beside their texts."""
    inner = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in items)
    return f'<dl class="facts">{inner}</dl>'


def badge(text: str, kind: str) -> str:
    """A state on a coloured ground. kind: `good`, `wait` or `bad`."""
    return f'<p><span class="state {kind}">{escape(text)}</span></p>'


def legend(keys: Iterable[Key]) -> str:
    return f'<p class="legend">{" ".join(f"<span>{_cell(key)}</span>" for key in keys)}</p>'


def _cell(cell: str | Key) -> str:
    if isinstance(cell, Key):
        return f'<i class="swatch {cell.colour}"></i>{escape(cell.name)}'
    return escape(cell)


def _class(of: str) -> str:
    return f' class="{of}"' if of else ""
