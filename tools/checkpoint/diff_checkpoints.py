"""Differences of two checkpoints, for `megalite-inspect-checkpoint diff`."""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from megalite.base.errors import InputError
from megalite.checkpoint.run.tensors import Checkpoint
from megalite_tools.checkpoint.checkpoints import choose, find, layout_of
from megalite_tools.checkpoint.values import Difference, difference
from megalite_tools.terminal import Terminal, bar


def diff(options: argparse.Namespace, terminal: Terminal) -> tuple[dict[str, Any], bool]:
    """Prints how `options.a` and `options.b` differ. Returns that for JSON, and if all tensors are within tolerance."""
    if not options.tolerance >= 0:
        raise InputError(f"--tolerance {options.tolerance}: must be 0 or more")
    a, b = (Checkpoint(find(path)[-1]) for path in (options.a, options.b))
    names = choose({**a.tensors, **b.tensors}, options.tensors)
    keys = changed_keys(a.manifest.config, b.manifest.config)
    found = _compare(a, b, names)
    beyond = [name for name, apart in found.items() if not _within(apart, options.tolerance)]
    alike = not beyond and len(found) == len(names)
    _print(a, b, names, keys, found, terminal)
    terminal.line(verdict(names, found, beyond, options.tolerance))
    tensors = [
        {
            "name": name,
            "a": a.kind(name),
            "b": b.kind(name),
            **(asdict(found[name]) if name in found else dict.fromkeys(("largest", "relative", "bitwise"))),
        }
        for name in names
    ]
    report = {"a": str(a.path), "b": str(b.path), "tolerance": options.tolerance, "equal": alike}
    return {**report, "config": [{"key": key, "a": x, "b": y} for key, x, y in keys], "tensors": tensors}, alike


def changed_keys(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The dotted keys in which two configurations differ, with both values; a missing key is null."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    pairs = [(key, flat_a.get(key), flat_b.get(key)) for key in flat_a | flat_b]
    return [(key, x, y) for key, x, y in pairs if x != y]


def verdict(names: list[str], found: dict[str, Difference], beyond: list[str], tolerance: float) -> str:
    """The result in one line. found: for tensors of the same shape in both; beyond: those that differ too much."""
    unequal = [name for name, apart in found.items() if not apart.bitwise]
    most = max(unequal, key=lambda name: found[name].relative, default="")
    at_most = f"at most {found[most].relative:.3g} relative, in {most}" if most else ""
    lacking = len(names) - len(found)
    if beyond or lacking:
        allowed = f" by more than {tolerance:g}" if tolerance else ""
        parts = [f"{len(beyond):,} of {len(names):,} tensors differ{allowed}"] if beyond else []
        parts += [f"{lacking:,} of {len(names):,} are in one only, or of another shape"] if lacking else []
        return "different: " + "; ".join([*parts, at_most] if at_most else parts)
    if unequal:
        return f"equal within {tolerance:g}: {len(names):,} tensors, {len(unequal):,} of them not to the bit; {at_most}"
    return f"equal to the bit: {len(names):,} tensors"


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _compare(a: Checkpoint, b: Checkpoint, names: Iterable[str]) -> dict[str, Difference]:
    """The differences of tensors that have the same shape in both, the largest first."""
    common = [name for name in names if name in a.tensors and name in b.tensors]
    common = [name for name in common if a.tensors[name].shape == b.tensors[name].shape]
    work = {name: a.tensors[name].bytes + b.tensors[name].bytes for name in common}
    found = {}
    with bar("comparing", sum(work.values())) as advanced:
        for name in common:
            found[name] = difference(a.read(name), b.read(name))
            advanced(work[name])
    return dict(sorted(found.items(), key=lambda item: -item[1].relative))


def _within(apart: Difference, tolerance: float) -> bool:
    return apart.bitwise or (tolerance > 0 and apart.relative <= tolerance)


def _print(
    a: Checkpoint,
    b: Checkpoint,
    names: Iterable[str],
    keys: list[tuple[str, Any, Any]],
    found: dict[str, Difference],
    terminal: Terminal,
) -> None:
    for letter, side in (("A", a), ("B", b)):
        terminal.line(f"{letter}: {side.path}, step {side.manifest.step:,}, {layout_of(side.manifest)}")
    if keys:
        terminal.table(["configuration:", "A:", "B:"], [(key, json.dumps(x), json.dumps(y)) for key, x, y in keys])
    if lacking := [name for name in names if name not in found]:
        rows = [(name, *(side.type(name) for side in (a, b))) for name in lacking]
        terminal.table(["only in one, or of another shape:", "A:", "B:"], rows)
    rows = [
        (
            name,
            " and ".join(dict.fromkeys((a.type(name), b.type(name)))),
            f"{apart.largest:.3g}",
            f"{apart.relative:.3g}",
        )
        for name, apart in found.items()
        if not apart.bitwise
    ]
    if rows:
        terminal.table(["tensor:", "type:", "difference", "relative"], rows)
