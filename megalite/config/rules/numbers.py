"""Divisibility of numbers, and numbers nearby that would do."""

from collections.abc import Iterator
from functools import cache
from math import isqrt

from megalite.base.errors import Problem, listing
from megalite.config.rules.ranges import most

MAX_DIVISOR = 1 << 17  # divisors beyond this are not suggested


def divisible(key: str, value: int, by_key: str, by: int, otherwise: str = "") -> Iterator[Problem]:
    """A problem unless `by` divides `value`; `otherwise` ends the fix.

    Numbers outside of their own bounds are passed over: another rule reports them, and no number nearby would do.
    """
    if not 1 <= value <= most(key) or not 1 <= by <= most(by_key) or value % by == 0:
        return
    fitting = {key: multiples(value, by, most(key)), by_key: [n for n in divisors(value, by) if n <= most(by_key)]}
    advice = [f"{name.rpartition('.')[2]} {listing(numbers)}" for name, numbers in fitting.items() if numbers]
    yield Problem(key, f"must be divisible by {by_key} = {by}", f"use {', or '.join(advice)}{otherwise}", value)


def multiples(value: int, by: int, bound: float) -> list[int]:
    """The positive multiples of `by` next to `value`, up to `bound`."""
    below = value // by * by
    return [multiple for multiple in (below, below + by) if 0 < multiple <= bound]


def divisors(value: int, near: int, unit: int = 1) -> list[int]:
    """Up to four divisors of `value` that are multiples of `unit`: those nearest to `near`."""
    candidates = range(unit, min(value, 2 * max(near, unit), MAX_DIVISOR) + 1, unit)
    found = [number for number in candidates if value % number == 0]
    return sorted(sorted(found, key=lambda number: abs(number - near))[:4])


@cache
def every_divisor(number: int, most: int | None = None) -> list[int]:
    """All divisors up to `most`, ascending. It takes min(most, √number) steps."""
    bound = number if most is None else most
    small = [divisor for divisor in range(1, min(isqrt(number), bound) + 1) if number % divisor == 0]
    return sorted(divisor for divisor in {*small, *(number // divisor for divisor in small)} if divisor <= bound)
