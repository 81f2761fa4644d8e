"""Times, numbers and tables as people read them. Texts from files are made printable first."""

from __future__ import annotations

import json
import textwrap
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

DAY, HOUR, MINUTE = 86_400, 3600, 60
MINUTES_THRESHOLD = 999.5  # seconds, from which on `seconds_text` writes minutes
UNITS = (  # units of times: from how many seconds on, the seconds of one, and its name
    (2 * DAY, (DAY, "days")),
    (2 * HOUR, (HOUR, "hours")),
    (MINUTES_THRESHOLD, (MINUTE, "minutes")),
    (0.9995, (1.0, "s")),
    (0.9995e-3, (1e-3, "ms")),
    (0.0, (1e-6, "µs")),
)
MIN_WIDTH = 30  # characters of a column that is wrapped
DECIMAL_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY_UNITS = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
Prefixes = tuple[tuple[float, str], ...]
HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # could disturb a terminal or mislead a reader


def escaped(text: str, kept: str = "\n\t") -> str:
    """A text with codes in place of characters that could disturb a terminal or mislead a reader, but for `kept`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in kept and unicodedata.category(character) in HIDDEN_CATEGORIES
        else character
        for character in text
    )


def printable(text: object, longest: int = 2000) -> str:
    """A text on one line, without what could disturb a terminal: such characters are written as their codes."""
    shown = escaped(str(text)[: longest + 1].replace("\t", "    "), kept="")
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def lasting(seconds: float) -> str:
    """A time that is waited for: `350 ms`, `2.50 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1e3:.3g} ms"
    if seconds < MINUTE - 0.05:
        return f"{seconds:.3g} s"
    for unit, size, lower, part in ((MINUTE, "min", 1, "s"), (HOUR, "h", MINUTE, "min"), (DAY, "d", HOUR, "h")):
        whole, rest = divmod(round(seconds / lower), unit // lower)
        if seconds < {MINUTE: HOUR, HOUR: DAY, DAY: float("inf")}[unit] - lower / 2:
            return f"{whole:,} {size} {rest} {part}" if rest else f"{whole:,} {size}"
    raise AssertionError("days have no end")


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time is written: its seconds and name. Two days and two hours are the least of theirs."""
    return next((unit for least, unit in UNITS if seconds >= least), UNITS[-1][1])


def seconds_text(seconds: float, beside: Optional[float] = None) -> str:
    """A time that is computed with: `1.23 s`, `45.6 ms`, `12.5 hours`; in the unit of the one that it stands beside."""
    length = seconds if beside is None else beside
    size, name = time_unit(length if length >= MINUTES_THRESHOLD else min(seconds, MINUTES_THRESHOLD / 2))
    return f"{seconds / size:,.1f} {name}" if size >= MINUTE else f"{rounded(seconds / size)} {name}"


def rounded(value: float) -> str:
    """Three digits, or all of a large number: `0.0123`, `45.6`, `1,234`."""
    return f"{value:,.0f}" if value >= 999.5 or value == 0 else f"{value:#.3g}".rstrip(".")


def scaled(value: float, unit: str, prefixes: Prefixes = DECIMAL_UNITS) -> str:
    """A number of units to three digits, with a prefix: `42.6 MFLOP/s`, or with BINARY_UNITS `51.2 GiB`."""
    size, prefix = next(((size, prefix) for size, prefix in prefixes if value >= 0.9995 * size), (1.0, ""))
    number = value / size
    if number >= 999.5 or (isinstance(value, int) and not prefix):
        return f"{number:,.0f} {prefix}{unit}"
    return f"{rounded(number)} {prefix}{unit}"


def memory_text(size: float) -> str:
    """Bytes of memory: `51.2 GiB`."""
    return scaled(round(size), "B", BINARY_UNITS)


def clock(moment: float) -> str:
    """The local time of a moment, which is seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def share(value: object) -> str:
    """A part of a whole: `98.6%`."""
    return f"{value:.1%}" if isinstance(value, float) else "not known"


def counted(number: float, one: str, several: str = "") -> str:
    """A number and what it counts, `1 rank` or `1,024 ranks`; `several` is the plural, if that does not end in s."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {one if number == 1 else several or one + 's'}"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,), width: Optional[int] = None
) -> str:
    """A table, which does not end in a line end.

    text: columns that are aligned left; the others hold numbers. width: of all; to fit in, the last column is wrapped.
    """
    lines = [header, *rows] if any(header) else list(rows)
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    if width is not None:
        widths[-1] = min(widths[-1], max(MIN_WIDTH, width - sum(widths[:-1]) - 2 * len(widths[:-1])))

    def one(line: Sequence[str]) -> list[str]:
        ends = [line[-1]] if width is None else textwrap.wrap(line[-1], widths[-1]) or [""]
        starts = [line[:-1], *[[""] * (len(line) - 1)] * (len(ends) - 1)]
        return [
            "  ".join(
                cell.ljust(size) if at in text else cell.rjust(size)
                for at, (cell, size) in enumerate(zip([*start, end], widths))
            ).rstrip()
            for start, end in zip(starts, ends)
        ]

    return "\n".join(part for line in lines for part in one(line))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown. Cells are made printable and may not end a column: a bar becomes a slash."""

    def cell(value: object) -> str:
        return printable(" ".join(str(value).split())).replace("|", "/")

    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def record_text(record: Mapping[str, Any]) -> str:
    """A record of measurements as JSON: every key on a line, and every row of a list, so that two can be compared."""
    lines = []
    for key, value in record.items():
        rows = [f"\n  {json.dumps(row)}" for row in value] if isinstance(value, list) else []
        lines.append(f" {json.dumps(key)}: " + (f"[{','.join(rows)}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"
