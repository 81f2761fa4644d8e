"""JUnit reports of pytest: how many tests passed, which failed, and all reports in one file."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megalite.base.files import is_file

MAX_LISTED = 20  # tests that failed, by name
MAX_REPORT_BYTES = 64 << 20  # bytes of a report
MAX_FAILURE_LENGTH = 8192  # characters of a failure, of which the end says most
OUTPUTS = ("system-out", "system-err")


def counts(paths: Iterable[Path]) -> dict[str, Any]:
    """Tests by outcome, and the names of those that failed; empty without a report."""
    found: dict[str, Any] = {}
    for suite in _suites(paths):
        for case in suite.iter("testcase"):
            if not case.get("name"):  # pytest-xdist has one for a test that was under way when it was interrupted
                continue
            outcome = "passed"
            for child in case:
                outcome = {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(child.tag, outcome)
            found[outcome] = found.get(outcome, 0) + 1
            if outcome == "failed":
                names = found.setdefault("names", [])
                if len(names) < MAX_LISTED:
                    names.append(f"{case.get('classname', '')}::{case.get('name', '')}"[:200])
    return found


def merged(paths: Iterable[Path]) -> bytes:
    """All test suites of some reports, as one report; without what the tests have printed, which may be large."""
    whole = ElementTree.Element("testsuites")
    whole.extend(_suites(paths))
    for case in whole.iter("testcase"):
        for output in [child for child in case if child.tag in OUTPUTS]:
            case.remove(output)
        for child in case:
            child.text = (child.text or "")[-MAX_FAILURE_LENGTH:]
    return ElementTree.tostring(whole, encoding="utf-8", xml_declaration=True)


def _suites(paths: Iterable[Path]) -> Iterator[ElementTree.Element]:
    for path in paths:
        try:
            if is_file(path) and path.stat().st_size <= MAX_REPORT_BYTES:
                yield from ElementTree.parse(path).getroot().iter("testsuite")
        except (OSError, ElementTree.ParseError, LookupError, ValueError):  # half of a report, or none
            continue
