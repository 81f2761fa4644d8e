"""Findings of a preflight on a node, and the file in which it writes them."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ..base.errors import UserError
from ..base.files import read_bytes, write_whole
from .thresholds import Limits

OK, WARN, FAIL, UNCHECKED = "ok", "warn", "fail", "unchecked"
LISTS = {"failures": FAIL, "warnings": WARN, "unchecked": UNCHECKED, "fine": OK}  # keys of the file
COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt}
MAX_FILE_BYTES = 2**22  # bytes of a file
FILE = re.compile(r"preflight-(?P<node>[A-Za-z0-9._-]+)\.json")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str  # as docs/preflight.md names it
    result: str  # OK, WARN, FAIL or UNCHECKED
    value: Any  # value that was found; None if none could be
    rule: str  # rule that should hold
    text: str  # a sentence for people


@dataclass
class Sheet:
    """All findings on a node."""

    node: str
    level: str  # light or full
    gpu: str = ""  # the name of its GPUs, `cpu` without any
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)  # figures to compare between nodes and between preflights
    versions: dict[str, Optional[str]] = field(default_factory=dict)

    def add(self, check: str, result: str, value: Any, rule: str, text: str) -> None:
        self.findings.append(Finding(check, result, value, rule, text))

    def judge(self, check: str, value: float, sign: str, limits: Limits, key: str, text: str) -> None:
        """Add a finding on a value that is bad where it is `sign` (>, >= or <) the limits KEY_fail or KEY_warn."""
        result, rules = OK, []
        for name, outcome in (("warn", WARN), ("fail", FAIL)):
            limit = limits.number(f"{key}_{name}")
            if limit is not None:
                rules.append(f"{name} {sign} {limit:g}")
                result = outcome if COMPARISONS[sign](value, limit) else result
        self.add(check, result, value, ", ".join(reversed(rules)), text)

    def of(self, result: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.result == result]

    @property
    def passed(self) -> bool:
        return not self.of(FAIL)

    @property
    def reason(self) -> str:
        """Reason why the node failed, in one line; empty if it did not."""
        return "; ".join(f"{finding.check}: {' '.join(finding.text.split())}" for finding in self.of(FAIL))


def as_json(sheet: Sheet) -> dict[str, Any]:
    """The content of a node's file."""
    lists = {
        key: [
            {"check": found.check, "value": found.value, "rule": found.rule, "text": found.text}
            for found in sheet.of(result)
        ]
        for key, result in LISTS.items()
    }
    return {
        "node": sheet.node,
        "level": sheet.level,
        "passed": sheet.passed,
        "gpu": sheet.gpu,
        **lists,
        "measured": sheet.measured,
        "versions": sheet.versions,
    }


def sheet_path(folder: Path, node: str) -> Path:
    return folder / f"preflight-{node}.json"


def write_sheet(folder: Path, sheet: Sheet) -> Path:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = sheet_path(folder, sheet.node)
    write_whole(path, json.dumps(as_json(sheet), indent=1, allow_nan=False) + "\n")
    return path


def read_sheet(path: Path) -> Sheet:
    """Raises UserError if the file is none of a node."""
    try:
        read = json.loads(read_bytes(path, MAX_FILE_BYTES), parse_constant=refuse_constant)
        return _sheet(read)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: is no file of megalite-preflight: {error}; run the check again") from None


def _sheet(read: Any) -> Sheet:
    if not NODE.fullmatch(read["node"]) or read["level"] not in ("light", "full"):
        raise ValueError("`node` or `level` is none")
    if not isinstance(read["gpu"], str) or not isinstance(read["measured"], dict):
        raise ValueError("`gpu` or `measured` is none")
    versions = read["versions"]
    if not all(isinstance(value, (str, type(None))) for value in versions.values()):
        raise ValueError("`versions` must be texts")
    findings = [
        Finding(str(found["check"]), result, found["value"], str(found["rule"]), str(found["text"]))
        for key, result in LISTS.items()
        for found in read[key]
    ]
    return Sheet(read["node"], read["level"], read["gpu"], findings, read["measured"], dict(versions))


def refuse_constant(constant: str) -> float:
    """Raise ValueError for NaN and infinities, which JSON does not have; for `parse_constant` of json.loads."""
    raise ValueError(f"{constant} is no number")


def number(measured: Mapping[str, Any], *keys: str) -> Optional[float]:
    """The finite number at the path `keys` in what a node has measured; None if there is none."""
    found: Any = measured
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    usable = isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if usable else None
