"""Fields of a table, by column: numbers within bounds, and words of closed vocabularies. Imports no torch.

Nothing is guessed: a field that is neither empty nor understood raises ValueError with the column, the value and what
is known.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from megalite.base.errors import listing

MIN_NUMBER = 1e-9  # lower bound of a speed, a time or a memory
MAX_COUNTS = {  # upper bounds of numbers in a row
    "experts": 1 << 16,
    "layers": 1 << 14,
    "hidden": 1 << 20,
    "ffn": 1 << 24,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "vocab": 1 << 26,
    "seq": 1 << 30,
    "n_gpus": 1 << 20,
    "micro_batch": 1 << 20,
    "global_batch": 1 << 30,
}
Word = TypeVar("Word", bound=str)


def word(fields: Mapping[str, str], key: str, known: Iterable[Word], default: Word | None = None) -> Word:
    """Read one of the known words, in whatever case; `default` for an empty field."""
    words = {each.lower(): each for each in known}
    text = fields[key].strip().lower()
    if not text and default is not None:
        return default
    if text not in words:
        raise ValueError(f"{key} = {fields[key].strip()!r:.40}: must be {listing(list(words.values()))}")
    return words[text]


def number(fields: Mapping[str, str], key: str, most: float) -> float | None:
    """Read a number above 0; None for an empty field."""
    text = fields[key].strip()
    if not text:
        return None
    value = _value(key, text)
    if not MIN_NUMBER <= value <= most:
        raise ValueError(f"{key} = {text!r:.40}: must be a number of at least {MIN_NUMBER:g}, and at most {most:g}")
    return value


def whole(fields: Mapping[str, str], key: str, default: int | None = None, least: int = 1) -> int:
    """Read a whole number; `default` for an empty field."""
    most = MAX_COUNTS.get(key, MAX_COUNTS["n_gpus"])
    text = fields[key].strip()
    if not text and default is not None:
        return default
    value = _value(key, text)
    if not least <= value <= most or value != int(value):
        raise ValueError(f"{key} = {text!r:.40}: must be a whole number of at least {least}, and at most {most:,}")
    return int(value)


def _value(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key} = {text!r:.40}: must be a number") from None
