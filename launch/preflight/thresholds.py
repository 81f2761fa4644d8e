"""The limits of a preflight, by GPU kind: read from launch/thresholds.yaml and a site's own file.

A file is a small part of YAML, for which the standard library is enough: sections, and in each `key: value`, where a
value is a number, a text, a list in brackets or null. Whatever else YAML allows is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from ..base.errors import UserError

Scalar = Union[float, str]
Value = Union[Scalar, list[Scalar], None]
Sections = dict[str, dict[str, Value]]

OWN_FILE = Path(__file__).parents[1] / "thresholds.yaml"
COMMON_SECTION = "all"  # the section for every node
MAX_FILE_BYTES = 2**20  # bytes of a file
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
PLAIN_TEXT = re.compile(r"[^\s\[\]{},:#&*!|>'\"%@`?-][^\[\]{},:#'\"]*")  # text that needs no quotes
QUOTED_TEXT = re.compile(r"\"([^\"\\]*)\"|'([^']*)'")
TEXT_KEYS, LIST_KEYS = ("cluster",), ("xid_fail", "xid_warn")  # keys with other values than a number
KIND_KEYS = ("names", "cluster")  # keys that `all` cannot have


@dataclass(frozen=True)
class Limits:
    """Limits that hold for a node: the keys of `all`, replaced by those of the kind of its GPUs."""

    values: Mapping[str, Value]

    def number(self, key: str) -> Optional[float]:
        """The limit of that name; None: there is no such rule."""
        value = self.values.get(key)
        return value if isinstance(value, float) else None

    def numbers(self, key: str) -> list[int]:
        value = self.values.get(key)
        return [int(entry) for entry in value if isinstance(entry, float)] if isinstance(value, list) else []

    def text(self, key: str) -> Optional[str]:
        value = self.values.get(key)
        return value if isinstance(value, str) else None


@dataclass(frozen=True)
class Thresholds:
    """The sections of all files together."""

    sections: Mapping[str, Mapping[str, Value]]

    def of(self, gpu: str) -> Limits:
        """The limits for GPUs of this name, as nvidia-smi prints it, or for `cpu`."""
        for values in self.sections.values():
            names = values.get("names")
            if isinstance(names, list) and gpu in names:
                return Limits({**self.sections[COMMON_SECTION], **values})
        return Limits(self.sections[COMMON_SECTION])


def load_thresholds(site: Optional[Path] = None) -> Thresholds:
    """Ours, with the keys that the file `site` replaces. Raises UserError, naming file, line and rule."""
    sections = read_sections(OWN_FILE)
    if site is not None:
        for kind, values in read_sections(site).items():
            known = {*sections[COMMON_SECTION], *KIND_KEYS}
            for key, value in values.items():
                problem = _misfit(kind, key, value, known)
                if problem:
                    raise UserError(f"{site}: {kind}: {key}: {problem}")
            if kind not in sections and not isinstance(values.get("names"), list):
                raise UserError(f"{site}: {kind}: a new kind needs `names: [...]`, as nvidia-smi prints them")
            sections[kind] = {**sections.get(kind, {}), **values}
    return Thresholds(sections)


def _misfit(kind: str, key: str, value: Value, known: set[str]) -> str:
    """Return what is wrong with a key of a site's file; empty if nothing is."""
    if key not in known:
        return f"is not known; known are {', '.join(sorted(known))}"
    if key in KIND_KEYS and kind == COMMON_SECTION:
        return "belongs to a kind of GPU"
    if key == "names":
        fits = isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)
        return "" if fits else "must be a list of texts"
    if value is None:
        return ""
    if key in TEXT_KEYS:
        return "" if isinstance(value, str) else "must be a text or null"
    if key in LIST_KEYS:
        whole = isinstance(value, list) and all(isinstance(e, float) and e.is_integer() for e in value)
        return "" if whole else "must be a list of whole numbers"
    return "" if isinstance(value, float) and value >= 0 else "must be a number of at least 0, or null"


def read_sections(path: Path) -> Sections:
    """The sections of a file. Raises UserError if it cannot be read, or is no such file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise UserError(f"{path}: has more than {MAX_FILE_BYTES:,} bytes; it is no file of thresholds")
    try:
        return parse_sections(raw.decode())
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def parse_sections(text: str) -> Sections:
    """The sections of a text. Raises ValueError, which names the line."""
    found: Sections = {}
    section: Optional[dict[str, Value]] = None
    for number, line in enumerate(text.split("\n"), 1):
        content = _without_comment(line.rstrip("\r"))
        if not content.strip():
            continue
        if content[0] == "\t":
            raise ValueError(f"line {number}: starts with a tab; use spaces")
        key, colon, rest = content.strip().partition(":")
        key, indented = key.rstrip(), content[0] == " "
        if not colon or not NAME.fullmatch(key):
            raise ValueError(f"line {number}: must be `section:` or `  key: value`, not {line.strip()!r:.60}")
        if indented and not rest.startswith(" "):
            raise ValueError(f"line {number}: {key}: needs a space and a value after the colon")
        if not indented:
            if rest.strip():
                raise ValueError(f"line {number}: {key}: a section has its keys on the next lines, indented")
            if key in found:
                raise ValueError(f"line {number}: {key}: is there twice")
            section = found[key] = {}
        elif section is None:
            raise ValueError(f"line {number}: {key}: stands before the first section")
        elif key in section:
            raise ValueError(f"line {number}: {key}: is there twice")
        else:
            section[key] = _value(rest.strip(), f"line {number}: {key}")
    return found


def _without_comment(line: str) -> str:
    """The line up to a `#` that is not inside of quotes."""
    quote = ""
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (place == 0 or line[place - 1] in " \t"):
            return line[:place]
    return line


def _value(text: str, where: str) -> Value:
    if text in ("null", "~"):
        return None
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [_scalar(entry.strip(), where) for entry in inner.split(",")] if inner else []
    return _scalar(text, where)


def _scalar(text: str, where: str) -> Scalar:
    if NUMBER.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            raise ValueError(f"{where}: {text:.30} is too large")
        return number
    quoted = QUOTED_TEXT.fullmatch(text)
    if quoted:
        return quoted[1] if quoted[1] is not None else quoted[2]
    if PLAIN_TEXT.fullmatch(text) and text not in ("true", "false", "yes", "no", "on", "off"):
        return text
    raise ValueError(f"{where}: {text!r:.60} must be a number, a text, [a list of these] or null")
