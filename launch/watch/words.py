"""Times, numbers and tables for people. What comes from files is made printable first."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

DAY, HOUR, MINUTE = 86_400, 3600, 60
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # categories that could disturb a terminal or mislead a reader


def printable(text: object, longest: int = 2000) -> str:
    """A text on one line, without what could disturb a terminal: such characters are written as their codes."""
    found = str(text)[: longest + 1]
    shown = "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in HIDDEN else character
        for character in found.replace("\t", "    ")
    )
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def lasting(seconds: float) -> str:
    """How long something takes: `350 ms`, `2.50 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1e3:.3g} ms"
    if seconds < MINUTE - 0.05:
        return f"{seconds:.3g} s"
    for unit, size, lower, part in ((MINUTE, "min", 1, "s"), (HOUR, "h", MINUTE, "min"), (DAY, "d", HOUR, "h")):
        whole, rest = divmod(round(seconds / lower), unit // lower)
        if seconds < {MINUTE: HOUR, HOUR: DAY, DAY: float("inf")}[unit] - lower / 2:
            return f"{whole:,} {size} {rest} {part}" if rest else f"{whole:,} {size}"
    raise AssertionError("days have no end")


def scaled(value: float, unit: str) -> str:
    """A number to three digits with a prefix: `42.6 Mtokens/s`."""
    size, prefix = next(((size, prefix) for size, prefix in PREFIXES if value >= 0.9995 * size), (1.0, ""))
    number = value / size
    return f"{number:,.0f} {prefix}{unit}" if number >= 999.5 else f"{number:.3g} {prefix}{unit}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """A table. text: columns that are aligned left; the others hold numbers."""
    lines = [header, *rows] if any(header) else list(rows)
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]

    def one(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if at in text else cell.rjust(width) for at, (cell, width) in enumerate(zip(line, widths))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(one, lines))
