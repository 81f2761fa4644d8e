"""Bound on how many times longer the normalizers and decoders of a `tokenizer.json` make a text.

Each step of a few bytes may double a text, so a small file can ask for any amount of memory. A trial finds that only
with the characters that it tries.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

MAX_GROWTH = 2000  # ALBERT has 648
GROWTH = {  # characters made of one, at most
    "BertNormalizer": 8.0,
    "ByteLevel": 4.0,
    "Lowercase": 2.0,
    "NFC": 3.0,
    "NFD": 4.0,
    "NFKC": 18.0,
    "NFKD": 18.0,
}


def growth(file: bytes) -> float:
    """The larger factor of the two ways, of a text to tokens and back; 1 for what is no such file, which the package
    refuses."""
    try:
        content = json.loads(file)
        return max(prod(map(_factor, _steps(content.get(key)))) for key in ("normalizer", "decoder"))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return 1.0


def _steps(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for key in ("normalizers", "decoders"):
            for inner in node.get(key) or ():
                yield from _steps(inner)


def _factor(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step)
    if kind == "Precompiled":
        return _longest_replacement(str(step.get("precompiled_charsmap") or ""))
    return GROWTH.get(str(kind), 1.0)


def _replaced(step: Mapping[str, Any]) -> float:
    """Characters put in place of one: where a match may be empty, before every character."""
    pattern, put = step.get("pattern"), len(str(step.get("content", "")))
    if not isinstance(pattern, Mapping):
        return 1.0
    if "String" in pattern:
        return max(1.0, put / max(1, len(str(pattern["String"]))))
    least = _least_match(str(pattern.get("Regex", "")))
    return max(1.0, put / least) if least else 1.0 + put


def _least_match(pattern: str) -> int:
    """Characters that a match has at least; 0 where that is not known."""
    try:
        return re._parser.parse(pattern).getwidth()[0]  # type: ignore[attr-defined]
    except (re.error, OverflowError, RecursionError):
        return 0


def _longest_replacement(charsmap: str) -> float:
    """Characters of the longest text in SentencePiece's map: 4 bytes of size, a trie, then texts that end in a 0."""
    try:
        content = base64.b64decode(charsmap)
    except ValueError:
        return 1.0  # which the package refuses
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return float(max(len(text.decode(errors="replace")) for text in texts.split(b"\0")) or 1)
