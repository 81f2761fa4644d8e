"""JUnit reports of pytest: how many tests passed, which failed, and all reports in one file."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SHOWN = 20  # tests that failed, by name


def counts(paths: Iterable[Path]) -> dict[str, Any]:
    """Tests by outcome, and the names of those that failed; empty without a report."""
    found: dict[str, Any] = {}
    for suite in _suites(paths):
        for case in suite.iter("testcase"):
            outcome = "passed"
            for child in case:
                outcome = {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(child.tag, outcome)
            found[outcome] = found.get(outcome, 0) + 1
            if outcome == "failed":
                names = found.setdefault("names", [])
                if len(names) < SHOWN:
                    names.append(f"{case.get('classname', '')}::{case.get('name', '')}"[:200])
    return found


def merged(paths: Iterable[Path]) -> bytes:
    """All test suites of some reports, as one report."""
    whole = ElementTree.Element("testsuites")
    whole.extend(_suites(paths))
    return ElementTree.tostring(whole, encoding="utf-8", xml_declaration=True)


def _suites(paths: Iterable[Path]) -> Iterator[ElementTree.Element]:
    for path in paths:
        try:
            yield from ElementTree.parse(path).getroot().iter("testsuite")
        except (OSError, ElementTree.ParseError):  # not there, or half of one
            continue
