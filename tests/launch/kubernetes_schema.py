"""Checks documents by the API of Kubernetes 1.29 to 1.33: what passes has no field that any of them does not know."""

import json
from pathlib import Path
from typing import Any

TYPES: dict[str, Any] = json.loads(Path(__file__).with_name("kubernetes_1_29_to_1_33.json").read_text())["types"]
PLAIN = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


def kind_of(text: str) -> str:
    """A field's type without what is said about it."""
    return text.partition("@")[0].rstrip("!")


def wrong(value: Any, kind: str, where: str = "") -> list[str]:
    """Find what is wrong with a value of this type, each with its place."""
    if kind[0] == "[":
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [what for at, item in enumerate(value) for what in wrong(item, kind[1:-1], f"{where}[{at}]")]
    if kind[0] == "{":
        if not isinstance(value, dict):
            return [f"{where}: no mapping"]
        return [what for name, item in value.items() for what in wrong(item, kind[1:-1], f"{where}.{name}")]
    if kind[0] == "=":
        return [] if value in kind[1:].split("|") else [f"{where}: {value} is not {kind[1:]}"]
    if kind not in TYPES:
        fits = any(
            isinstance(value, PLAIN[each]) and (each == "boolean" or (value is not True and value is not False))
            for each in kind.split("|")
        )
        return [] if fits else [f"{where}: {value!r} is no {kind}"]
    fields = TYPES[kind]
    if isinstance(fields, str):
        return wrong(value, fields, where)
    if not isinstance(value, dict):
        return [f"{where}: no {kind}"]
    found = [f"{where}: {kind} has no {name}" for name in value.keys() - fields.keys()]
    found += [f"{where}: {kind} needs {name}" for name, text in fields.items() if "!" in text and name not in value]
    return found + [
        what
        for name, item in value.items()
        if name in fields
        for what in wrong(item, kind_of(fields[name]), f"{where}.{name}")
    ]
