"""The identity of a configuration: as a text, on all ranks of a job, and as a run of an experiment."""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from megalite.config.convert import leaves, to_plain
from megalite.config.schema import Config

RUN_ID_DIGITS = 10  # in a run's name
UNHASHED_KEYS = {
    "run": ("name", "dir", "cluster"),
    "checkpoint": (),
    "log": (),
    "profile": (),
}  # say nothing of what is trained
# Paths at which a node may keep its own copy.
NODE_KEYS = re.compile(r"data\.((train|valid)\[\d+\]\.path|tokenizer|remote\.cache)")


def digest_of(text: str, digits: int = 64) -> str:
    """The SHA-256 of a text, such as that of a whole configuration: its first hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def same_everywhere(config: Config) -> dict[str, Any]:
    """The keys that all ranks must have in common: all but paths of which each node may have a copy of its own."""
    return {key: value for key, value in leaves(to_plain(config)) if not NODE_KEYS.fullmatch(key)}


def run_id(plain: Mapping[str, Any], keeps_layout: bool) -> str:
    """The id of a run of an experiment: digits of the SHA-256 of its resolved configuration, as canonical JSON.

    Keys that do not affect the result are left out: where it is written and shown, how remote data is read, checkpoints
    but for the weights that a run begins with, and, unless layouts are compared, the layout, as all layouts train
    alike. Values at their defaults are left out as well, so that a key which a later version adds does not change the
    id of a finished run.
    """
    kept = {section: value for section, value in plain.items() if section not in UNHASHED_KEYS}
    kept["run"] = {key: value for key, value in plain["run"].items() if key not in UNHASHED_KEYS["run"]}
    kept["data"] = {key: value for key, value in plain["data"].items() if key != "remote"}
    kept["checkpoint"] = {"weights": plain["checkpoint"]["weights"]}
    if not keeps_layout:
        del kept["parallel"]
        kept["batch"] = {key: value for key, value in plain["batch"].items() if key not in ("micro", "memory")}
    set_ = _besides(_canonical(kept), _defaults())
    return digest_of(json.dumps(set_, sort_keys=True, separators=(",", ":"), ensure_ascii=True), RUN_ID_DIGITS)


@cache
def _defaults() -> dict[str, Any]:
    return to_plain(Config())


def _besides(plain: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not those of `defaults`."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _besides(value, default)
            if value:
                found[key] = value
        elif value != default or key not in defaults:
            found[key] = value
    return found


def _canonical(value: Any) -> Any:
    """The value with one spelling of each number: 0.0 for -0.0."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return value + 0.0 if isinstance(value, float) else value
