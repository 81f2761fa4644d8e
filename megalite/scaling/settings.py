"""What an experiment says about its fits: the sections `fit`, `holdout` and `parameters` of `experiment.yaml`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.errors import InputError, listing
from megalite.config.yaml import read_mapping

METHODS = ("approach3", "approach1", "approach2", "kaplan")
DEFINITIONS = ("with_head", "total", "non_embedding")  # of N: with the output layer alone, all, layers alone
KINDS = ("systems", "sweep", "ladder")
LARGEST_DELTA, MOST_SAMPLES = 10.0, 10_000


@dataclass(frozen=True)
class Settings:
    """method: whose predictions count. delta: where Huber's loss becomes linear, in ln(loss).

    min_steps: runs with fewer are left out. drop: that many runs with the highest losses, or runs by id or slug.
    bootstrap: samples. holdout: rungs that no fit sees. parameters: the definition of N that counts. report: all
    definitions, that one first.
    """

    kind: str = ""
    name: str = ""
    method: str = "approach3"
    delta: float = 1e-3
    min_steps: int = 0
    drop: int | tuple[str, ...] = 0
    bootstrap: int = 1000
    holdout: tuple[str, ...] = ()
    parameters: str = "with_head"
    report: tuple[str, ...] = field(default=DEFINITIONS)


def read_settings(folder: Path) -> Settings:
    """Of the experiment in `folder`. Raises InputError that names the file, the key, the value and the rule."""
    path = folder / "experiment.yaml"
    content = read_mapping(path)
    experiment = _section(path, content, "experiment")
    kind, name = (content.get(key, experiment.get(key, "")) for key in ("kind", "name"))
    if kind not in KINDS:
        raise InputError(f"{path}: kind = {kind!r:.80}: must be {listing(KINDS)}")
    fit = _section(path, content, "fit")
    known = ("method", "delta", "min_steps", "drop", "bootstrap")
    for key in fit:
        if key not in known:
            raise InputError(f"{path}: fit: {key:.80} is unknown; known are {listing(known, 'and')}")
    parameters = _section(path, content, "parameters")
    chosen = _one_of(path, "parameters.fit", parameters.get("fit", "with_head"), DEFINITIONS)
    listed = _texts(path, "parameters.report", parameters.get("report", list(DEFINITIONS)))
    others = [_one_of(path, "parameters.report", each, DEFINITIONS) for each in listed]
    delta = fit.get("delta", Settings.delta)
    if type(delta) not in (int, float) or not 0 < delta <= LARGEST_DELTA or not math.isfinite(delta):
        raise InputError(f"{path}: fit.delta = {delta!r:.80}: must be a number above 0, at most {LARGEST_DELTA:g}")
    return Settings(
        kind,
        name if isinstance(name, str) else "",
        _one_of(path, "fit.method", fit.get("method", METHODS[0]), METHODS),
        float(delta),
        _whole(path, "fit.min_steps", fit.get("min_steps", 0), 10**12),
        _drop(path, fit.get("drop", 0)),
        _whole(path, "fit.bootstrap", fit.get("bootstrap", Settings.bootstrap), MOST_SAMPLES),
        tuple(_texts(path, "holdout.rungs", _section(path, content, "holdout").get("rungs", []))),
        chosen,
        tuple(dict.fromkeys([chosen, *others])),
    )


def _section(path: Path, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise InputError(f"{path}: {key} = {found!r:.80}: must be a section, with keys of its own")
    return found


def _one_of(path: Path, key: str, value: Any, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{path}: {key} = {value!r:.80}: must be {listing(known)}")
    return value


def _texts(path: Path, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{path}: {key} = {value!r:.80}: must be a list of texts")
    return value


def _whole(path: Path, key: str, value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise InputError(f"{path}: {key} = {value!r:.80}: must be a whole number from 0 to {most:,}")
    return value


def _drop(path: Path, value: Any) -> int | tuple[str, ...]:
    if isinstance(value, list):
        return tuple(_texts(path, "fit.drop", value))
    if type(value) is not int or value < 0:
        rule = "must be how many runs with the highest losses are left out, or a list of ids and slugs"
        raise InputError(f"{path}: fit.drop = {value!r:.80}: {rule}")
    return value
