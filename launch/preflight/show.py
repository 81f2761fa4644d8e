"""The table for people, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.texts import printable, table
from .compare import Verdict
from .findings import FAIL, OK, UNCHECKED, WARN, Sheet

RESULT_WORDS = {FAIL: "FAIL", WARN: "warn", UNCHECKED: "not checked", OK: "ok"}
WIDTH = 120


def sheet_text(sheet: Sheet) -> str:
    """All findings of a node, in the order of the checks."""
    rows = [(finding.check, RESULT_WORDS[finding.result], finding.text) for finding in sheet.findings]
    heading = f"{sheet.node} · {printable(sheet.gpu) or 'GPUs not known'} · {sheet.level}\n"
    return heading + _aligned(("check", "result", ""), rows) + _summary(sheet)


def verdict_text(verdict: Verdict) -> str:
    """A row for each node, and all that is not fine."""
    rows = []
    for sheet in verdict.sheets.values():
        counts = [str(len(sheet.of(result)) or "") for result in (FAIL, WARN, UNCHECKED, OK)]
        rows.append((sheet.node, "ok" if sheet.passed else "BAD", *counts))
    rows += [(node, "BAD", "", "", "", "") for node in verdict.missing]
    text = _aligned(("node", "", "failed", "warned", "not checked", "fine"), rows)
    told = [
        (sheet.node, RESULT_WORDS[finding.result], f"{finding.check}: {finding.text}")
        for result in (FAIL, WARN)
        for sheet in verdict.sheets.values()
        for finding in sheet.of(result)
    ]
    told = [(node, RESULT_WORDS[FAIL], reason) for node, reason in verdict.missing.items()] + told
    return text + ("\n" + _aligned(("node", "result", "check"), told) if told else "")


def _aligned(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, some of which other programs have printed."""
    return table(heading, [list(map(printable, row)) for row in rows], range(len(heading)), WIDTH) + "\n"


def _summary(sheet: Sheet) -> str:
    """Ends with the reason, in one line, by which a supervisor tells why a node was left out."""
    bad, mild, rest = (len(sheet.of(result)) for result in (FAIL, WARN, UNCHECKED))
    counts = f"{bad} failed, {mild} warned, {rest} not checked\n"
    return f"{counts}FAILED: {printable(sheet.reason)}\n" if bad else f"passed: {counts}"
