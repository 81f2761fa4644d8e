"""What a number must divide by, and which ones near it would do."""

from collections.abc import Iterator
from functools import cache
from math import isqrt

from megalite.config.errors import Problem, listing

SEARCHED = 1 << 17  # divisors beyond this are not suggested


def divisible(key: str, value: int, by_key: str, by: int, otherwise: str = "") -> Iterator[Problem]:
    """A problem unless `by` divides `value`; `otherwise` ends the fix."""
    if value < 1 or by < 1 or value % by == 0:
        return
    name, by_name = key.rpartition(".")[2], by_key.rpartition(".")[2]
    fix = f"use {name} {listing(multiples(value, by))}, or {by_name} {listing(divisors(value, by))}{otherwise}"
    yield Problem(key, f"must be divisible by {by_key} = {by}", fix, value)


def multiples(value: int, by: int) -> list[int]:
    """The positive multiples of `by` next to `value`."""
    below = value // by * by
    return [multiple for multiple in (below, below + by) if multiple]


def divisors(value: int, near: int, unit: int = 1) -> list[int]:
    """The divisors of `value` nearest to `near` that are multiples of `unit`, four at most."""
    candidates = range(unit, min(value, 2 * max(near, unit), SEARCHED) + 1, unit)
    found = [number for number in candidates if value % number == 0]
    return sorted(sorted(found, key=lambda number: abs(number - near))[:4])


@cache
def every_divisor(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
