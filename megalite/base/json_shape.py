"""Checks the shape of JSON from a file, and says where it has another one."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any


@dataclass(frozen=True)
class ValueKind:
    """Kind that a value must be of."""

    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Each:
    """An object all of whose values have one shape."""

    shape: Any


@dataclass(frozen=True)
class OrNull:
    """A value of a shape, or null."""

    shape: Any


def whole(least: int, power: int) -> ValueKind:
    """A whole number from `least` to below 2**power."""
    text = f"a whole number from {least} to 2**{power} - 1"
    return ValueKind(text, lambda value: type(value) is int and least <= value < 1 << power)  # a bool is no number


def digits(count: int) -> ValueKind:
    """A hash, as text."""
    pattern = re.compile(f"[0-9a-f]{{{count}}}")
    return ValueKind(
        f"{count} digits from 0 to f", lambda value: isinstance(value, str) and bool(pattern.fullmatch(value))
    )


WHOLE_NUMBER = ValueKind("a whole number", lambda value: type(value) is int)
TEXT = ValueKind("text", lambda value: isinstance(value, str))
SECTION = ValueKind("a section", lambda value: isinstance(value, dict))


def misfits(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Everything in `value`, found at `where`, that is not of `shape`.

    A shape is a ValueKind, an OrNull, an Each, a dictionary of shapes by name, or a list of the one shape that all
    items have.
    """
    if isinstance(shape, OrNull):
        if value is not None:
            yield from misfits(value, shape.shape, where)
    elif isinstance(shape, ValueKind):
        if not shape.holds(value):
            yield f"{where} = {shortened(value)}: must be {shape.text}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where} = {shortened(value)}: must be a list"
            return
        for number, item in enumerate(value):
            yield from misfits(item, shape[0], f"{where}[{number}]")
    elif not isinstance(value, dict):
        yield f"{where} = {shortened(value)}: must be an object"
    else:
        inner = dict.fromkeys(value, shape.shape) if isinstance(shape, Each) else shape
        for name, of in inner.items():
            if name in value:
                yield from misfits(value[name], of, f"{where}: {shortened(name)}")
            else:
                yield f"{where}: {shortened(name)} is missing"
        for name in value:
            if name not in inner:
                yield f"{where}: {shortened(name)} is unknown"
