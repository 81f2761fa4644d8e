"""Settings of runs, as an experiment file gives them: values by the dotted keys of a run's configuration."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isfinite, prod
from typing import Any

from megalite.base.errors import Problem, listing
from megalite.config.convert import hint, keys, leaves, sections
from megalite.experiment.schema import Random

MAX_RUNS = 20_000
DIGITS = 6  # significant digits of numbers that are drawn
OWN_KEYS = ("run.name", "run.dir", "run.seed", "checkpoint.resume", "checkpoint.at")  # megalite-sweep sets them
RANGES = {"log2": "powers of two", "uniform": "numbers"}
Settings = dict[str, Any]


@dataclass
class Axes:
    """Swept settings: `keys` in the order of the file, and every combination of their values."""

    keys: tuple[str, ...] = ()
    points: Sequence[Settings] = field(default_factory=lambda: [{}])


def flattened(value: Mapping[str, Any], where: str, problems: list[Problem]) -> Settings:
    """Settings by dotted keys; a file may have them in sections, `model: {width: 512}`, or dotted, `model.width: 512`.

    where: the place in the experiment file, for problems: keys that no configuration has, or that are set otherwise.
    """
    found: Settings = {}
    for key, inner in _flat(value, ""):
        if key in found:
            problems.append(Problem(f"{where}.{key}", "is given twice", "leave one of them out"))
        if check_key(key, f"{where}.{key}", problems):
            found[key] = inner
    return found


def check_key(key: str, where: str, problems: list[Problem]) -> bool:
    """Return whether a run's configuration has `key`, and an experiment may set it."""
    known = re.sub(r"\[\d+\]", "[]", key)
    if known not in keys() and known.removesuffix("[]") not in keys():
        problems.append(Problem(where, "is no key of a run's configuration", hint(key)))
    elif known in sections():
        problems.append(Problem(where, "is a section", f"name one of its keys, as in {key}.…"))
    elif key in OWN_KEYS:
        fix = "give experiment.seeds" if key == "run.seed" else "leave it out"
        problems.append(Problem(where, "is set by megalite-sweep itself", fix))
    else:
        return True
    return False


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, dict) and key in sections():
            yield from _flat(inner, f"{key}.")
        else:
            yield key, inner


def read_axes(
    grid: Mapping[str, Any], zips: Sequence[Mapping[str, Any]], drawn: Random | None, problems: list[Problem]
) -> Axes:
    """Every combination of the values of a grid, of rows of zipped keys, and of settings drawn at random."""
    parts: list[Sequence[Settings]] = []
    names: list[str] = []
    for key, value in flattened(grid, "grid", problems).items():
        values = _values(value, f"grid.{key}", problems)
        names.append(key)
        parts.append([{key: each} for each in values])
    for number, columns in enumerate(zips):
        where = f"zip[{number}]"
        lists = {
            key: _values(value, f"{where}.{key}", problems)
            for key, value in flattened(columns, where, problems).items()
        }
        lengths = {key: len(values) for key, values in lists.items()}
        if len(set(lengths.values())) > 1:
            told = listing([f"{key} has {length}" for key, length in lengths.items()], "and")
            problems.append(Problem(where, f"must have lists of one length, but {told}", "give each as many values"))
        names += lists
        parts.append([dict(zip(lists, row, strict=False)) for row in zip(*lists.values(), strict=False)])
    if drawn is not None:
        over = flattened(drawn.over, "random.over", problems)
        names += over
        parts.append(_draw(over, drawn, problems))
    for key in {name for name in names if names.count(name) > 1}:
        problems.append(Problem(key, "is swept twice: by grid, zip or random", "leave it out of all but one"))
    count = prod(map(len, parts))
    if count > MAX_RUNS:
        told = f"makes {count:,} combinations; at most {MAX_RUNS:,} runs are allowed"
        problems.append(Problem("grid", told, "give fewer values, or draw some of them with random"))
    if problems:
        return Axes(tuple(names))
    return Axes(tuple(names), [dict(pair for part in row for pair in part.items()) for row in product(*parts)])


def _values(value: Any, where: str, problems: list[Problem]) -> list[Any]:
    """The values of an axis: a list, or {log2: [first, last, step]}, whose exponents are evenly spaced."""
    if isinstance(value, list) and value:
        return list(value)
    if isinstance(value, dict) and list(value) == ["log2"]:
        numbers = value["log2"]
        if isinstance(numbers, list) and len(numbers) in (2, 3) and all(map(_is_number, numbers)):
            first, last, step = (*numbers, 1)[:3]
            if -100 <= first <= last <= 100 and step > 0 and (last - first) / step <= MAX_RUNS:
                return [_whole(2.0 ** (first + i * step)) for i in range(int((last - first) / step + 1e-9) + 1)]
        rule = "must be [first, last, step] of exponents from -100 to 100, ascending, as in [-10, -6, 0.5]"
        problems.append(Problem(f"{where}.log2", rule, value=numbers))
        return []
    problems.append(Problem(where, "must be a list of values, or {log2: [first, last, step]}", value=value))
    return []


def _draw(over: Settings, drawn: Random, problems: list[Problem]) -> list[Settings]:
    """`drawn.count` settings. The first n of them are the same for every count."""
    before = len(problems)
    for key, value in over.items():
        if not _is_range(value) and not (isinstance(value, list) and value):
            ranges = listing([f"{{{name}: [least, most]}}, for {what}" for name, what in RANGES.items()])
            problems.append(Problem(f"random.over.{key}", f"must be a list to choose from, {ranges}", value=value))
    if not over:
        problems.append(Problem("random.over", "is empty", "name the keys to draw values of"))
    if not 1 <= drawn.count <= MAX_RUNS:
        problems.append(Problem("random.count", f"must be from 1 to {MAX_RUNS:,}", value=drawn.count))
    if len(problems) > before:
        return []
    source = random.Random(drawn.seed)
    return [{key: _drawn(value, source) for key, value in over.items()} for _ in range(drawn.count)]


def _is_range(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) != 1 or not RANGES.keys() >= value.keys():
        return False
    (name, ends), *_ = value.items()
    if not isinstance(ends, list) or len(ends) != 2 or not all(map(_is_number, ends)) or ends[0] > ends[1]:
        return False
    return name != "log2" or -100 <= ends[0] <= ends[1] <= 100


def _drawn(value: Any, source: random.Random) -> Any:
    if isinstance(value, list):
        return value[source.randrange(len(value))]
    (name, (least, most)), *_ = value.items()
    drawn = source.uniform(least, most)
    return _whole(float(f"{2.0**drawn if name == 'log2' else drawn:.{DIGITS}g}"))


def _whole(number: float) -> int | float:
    """The number, as an integer where it is whole: that fits keys of both types."""
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The dotted keys in which two configurations, as plain dictionaries, differ."""
    left, right = dict(leaves(a)), dict(leaves(b))
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
