"""Errors that stop a command with a message instead of a traceback."""

import errno
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megalite_launch.base.texts import counted as counted
from megalite_launch.base.texts import escaped

MAX_VALUE_LENGTH = 400  # characters of a value
MAX_PROBLEMS = 100
MAX_MESSAGE_LENGTH = 4000  # characters of all problems that are shown
MAX_RANGES = 6  # ranges of ranks in a text
NO_VALUE: Any = object()  # marks a problem that has no value to show


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one configuration key; as text, one line."""

    key: str  # dotted, as in YAML
    rule: str  # condition that must hold
    fix: str = ""  # advice on what to do about it, unless the rule says it already
    value: Any = NO_VALUE

    def __str__(self) -> str:
        shown = (
            ""
            if self.value is NO_VALUE
            else f" = {_shortened(json.dumps(self.value, ensure_ascii=False, default=str))}"
        )
        return f"{_shortened(self.key)}{shown}: {self.rule}" + (f"; {self.fix}" if self.fix else "")


def _shortened(text: str) -> str:
    """Shorten to at most MAX_VALUE_LENGTH printable characters."""
    return printable(
        text
        if len(text) <= MAX_VALUE_LENGTH
        else f"{text[: MAX_VALUE_LENGTH // 2]} ... {text[-MAX_VALUE_LENGTH // 2 :]}"
    )


def printable(text: str, kept: str = "") -> str:
    """Return `text` with escapes instead of characters that could disturb a terminal, except for those in `kept`."""
    return escaped(text, kept)


class InputError(ValueError):
    """Bad input from the user: shown as one message, exit code BAD_INPUT.

    It is made from a message, or from all the problems of a configuration. Either may have names and values of files as
    they are: characters that could disturb a terminal are escaped here.
    """

    def __init__(self, what: str | Sequence[Problem]) -> None:
        self.problems = () if isinstance(what, str) else tuple(what)
        text = what if isinstance(what, str) else _listed(self.problems)
        cut = f" ... ({len(text) - MAX_MESSAGE_LENGTH:,} characters more)" if len(text) > 2 * MAX_MESSAGE_LENGTH else ""
        super().__init__(printable(text[:MAX_MESSAGE_LENGTH] + cut if cut else text, kept="\n"))


class Unhealthy(RuntimeError):
    """Training was stopped by one of its guards, on every rank: shown as one message, exit code UNHEALTHY."""


def unwritable(path: object, rule: str, error: OSError, fix: str) -> Exception:
    """The error to raise where a run cannot write: Unhealthy on a full disk, which no other input helps; InputError."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = f"{path}: {rule}: {error.strerror}; {'make room, and the same command goes on' if full else fix}"
    return Unhealthy(text) if full else InputError(text)


def _listed(problems: Sequence[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [str(problem) for problem in problems[:MAX_PROBLEMS]]
    shown = [
        line for line, end in zip(lines, accumulate(map(len, lines)), strict=True) if end <= MAX_MESSAGE_LENGTH
    ] or lines[:1]
    more = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    return "\n  ".join([f"{count} in the configuration", *shown, *more])


def listing(items: Sequence[object], last: str = "or") -> str:
    """The items in words: `1, 2 or 3`."""
    words = [str(item) for item in items]
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def number_ranges(numbers: Iterable[int], each: int = 1) -> str:
    """Ascending numbers as text, runs joined: `0-3, 8`. Number n stands for the `each` numbers from n·each on."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    spans = [(ends[0] * each, (ends[-1] + 1) * each - 1) for ends in ranges]
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in spans)


def ranks_text(ranks: Sequence[int]) -> str:
    """Sorted ranks as `rank 3`, or `8 ranks (0-6, 9)`, shortened."""
    ranges = number_ranges(ranks).split(", ")
    shown = ", ".join([*ranges[:MAX_RANGES], "…"] if len(ranges) > MAX_RANGES else ranges)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
