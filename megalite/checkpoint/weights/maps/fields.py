"""Reads the keys of another program's description of a model. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from megalite.base.errors import InputError
from megalite.config.rules.ranges import MAXIMA

MAX_NUMBER = 1e300  # number; whole ones beyond are more than a float can be
MAX_WHOLE = (1 << 31) - 1  # sizes and counts, whose products are still whole numbers of 64 bits
VALUE_REPR = Repr()  # for values, which may be nested deep
VALUE_REPR.maxstring = VALUE_REPR.maxother = 200


@dataclass
class Fields:
    """The keys of a config.json. Methods raise InputError where a value is not what it must be."""

    file: str
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        found = self.values.get(key)
        return default if found is None else found

    def whole(self, key: str, default: int | None = None) -> int:
        found = self.get(key, default)
        if type(found) is not int or not 1 <= found <= MAX_WHOLE:
            raise self.wrong(key, f"must be a whole number of at least 1, and at most {MAX_WHOLE:,}")
        return found

    def layers(self, key: str) -> int:
        """A number of layers, few enough for lists of them."""
        found, (most, why) = self.whole(key), MAXIMA["model.layers"]
        if found > most:
            raise self.wrong(key, f"must be at most {most:,}: {why}")
        return found

    def number(self, key: str, default: float | None = None, within: Mapping[str, Any] | None = None) -> float:
        found = (self.values if within is None else within).get(key, default)
        if type(found) not in (int, float) or not abs(found) <= MAX_NUMBER:  # not so of NaN
            raise self.wrong(key, f"must be a number of at most {MAX_NUMBER:g}", found)
        return float(found)

    def numbers(self, key: str, within: Mapping[str, Any]) -> list[float]:
        found = within.get(key)
        if not isinstance(found, list):
            raise self.wrong(key, "must be a list of numbers", found)
        return [self.number(key, within={key: each}) for each in found]

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.get(key, default)
        if type(found) is not bool:
            raise self.wrong(key, "must be true or false")
        return found

    def section(self, key: str) -> Mapping[str, Any] | None:
        found = self.get(key)
        if found is not None and not isinstance(found, dict):
            raise self.wrong(key, "must be an object or null")
        return found

    def refuse(self, key: str, expected: Any, why: str) -> None:
        """Raises InputError unless the key is left out, null, or has the only value that can be converted."""
        found = self.get(key, expected)
        if found != expected:
            raise self.wrong(key, f"{why}, which megalite does not convert")

    def wrong(self, key: str, rule: str, value: Any = None) -> InputError:
        return InputError(
            f"{self.file}: {key} = {VALUE_REPR.repr(self.values.get(key) if value is None else value)}: {rule}"
        )
