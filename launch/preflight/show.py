"""The table for people, as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .compare import Verdict
from .findings import FAIL, OK, UNCHECKED, WARN, Sheet

SHOWN = {FAIL: "FAIL", WARN: "warn", UNCHECKED: "not checked", OK: "ok"}
WIDTH = 120


def sheet_text(sheet: Sheet) -> str:
    """All findings of a node, in the order of the checks."""
    rows = [(finding.check, SHOWN[finding.result], finding.text) for finding in sheet.findings]
    heading = f"{sheet.node} · {sheet.gpu or 'GPUs not known'} · {sheet.level}\n"
    return heading + aligned(("check", "result", ""), rows) + _summary(sheet)


def verdict_text(verdict: Verdict) -> str:
    """A row for each node, and all that is not fine."""
    rows = []
    for sheet in verdict.sheets.values():
        counts = [str(len(sheet.of(result)) or "") for result in (FAIL, WARN, UNCHECKED, OK)]
        rows.append((sheet.node, "ok" if sheet.passed else "BAD", *counts))
    rows += [(node, "BAD", "", "", "", "") for node in verdict.missing]
    text = aligned(("node", "", "failed", "warned", "not checked", "fine"), rows)
    told = [
        (sheet.node, SHOWN[finding.result], f"{finding.check}: {finding.text}")
        for result in (FAIL, WARN)
        for sheet in verdict.sheets.values()
        for finding in sheet.of(result)
    ]
    told = [(node, SHOWN[FAIL], reason) for node, reason in verdict.missing.items()] + told
    return text + ("\n" + aligned(("node", "result", "check"), told) if told else "")


def aligned(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, of which the last is wrapped."""
    cleaned = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in [list(heading), *cleaned]) for place in range(len(heading) - 1)]
    room = max(30, WIDTH - sum(widths) - 2 * len(widths))
    lines = [heading, *cleaned]
    out = []
    for line in lines:
        start = "  ".join(cell.ljust(widths[place]) for place, cell in enumerate(line[:-1]))
        for part in textwrap.wrap(line[-1], room) or [""]:
            out.append(f"{start}  {part}".rstrip())
            start = " " * len(start)
    return "\n".join(out) + "\n"


def _printable(text: str) -> str:
    """Without characters that could disturb a terminal: some texts are what other programs printed."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _summary(sheet: Sheet) -> str:
    bad, mild = len(sheet.of(FAIL)), len(sheet.of(WARN))
    return f"{'FAILED' if bad else 'passed'}: {bad} failed, {mild} warned, {len(sheet.of(UNCHECKED))} not checked\n"
