"""JSON of unknown origin, parsed in bounded time and memory. Imports no torch."""

import json
from typing import Any

MAX_VALUES = 1 << 20  # in one document; the manifest of 16,384 ranks has 50,000


def parse(text: bytes, unique: bool = False) -> Any:
    """The content of the JSON `text`. Raises ValueError for no JSON, deep nesting, and more than MAX_VALUES values.

    A list of two bytes takes 64 bytes of memory, so a bound on the length of `text` alone is not enough. unique: refuse
    an object that has a key twice, of which JSON would take the last.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:  # every value but the first follows one of them
        raise ValueError(f"has more than {MAX_VALUES:,} values")
    try:
        return json.loads(text, object_pairs_hook=_each_once if unique else None)
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"has the key {twice:.100} twice")
    return found
