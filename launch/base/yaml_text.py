"""Writes YAML for plain values: what people read in a manifest, without a library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN_SCALAR = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
RESERVED_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # YAML's words for truth values and null


def yaml_text(value: Any, indent: int = 0) -> str:
    """Mappings, lists, texts, numbers and truth values as YAML, which ends in a line end."""
    margin = " " * indent
    if isinstance(value, Mapping) and value:
        return "".join(f"{margin}{_key(key, margin)}:{_inner(item, indent + 2)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        lines = [yaml_text(item, indent + 2) for item in value]
        return "".join(f"{margin}- {line[indent + 2 :]}" for line in lines)
    return f"{margin}{_scalar(value)}\n"


def _key(key: Any, margin: str) -> str:
    """A key, marked as one where it is longer than YAML finds by itself."""
    text = _scalar(key)
    return text if len(text) < 1000 else f"? {text}\n{margin}"


def _inner(value: Any, indent: int) -> str:
    """Text of a value as it follows the colon of a key."""
    nested = isinstance(value, (Mapping, list, tuple)) and value
    return f"\n{yaml_text(value, indent)}" if nested else f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    """JSON is YAML, but for people a plain word needs no quotes."""
    if isinstance(value, str) and PLAIN_SCALAR.fullmatch(value) and value.lower() not in RESERVED_WORDS:
        return value
    if isinstance(value, str):
        return '"' + "".join(map(_escaped, value)) + '"'
    return json.dumps(value)


def _escaped(character: str) -> str:
    """JSON writes what is beyond 16 bits as two surrogates, which are no characters in YAML."""
    return json.dumps(character)[1:-1] if ord(character) < 2**16 else f"\\U{ord(character):08x}"
