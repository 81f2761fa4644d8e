"""Checkpoints changed by somebody who knows how: sizes, hashes and digest are right afterwards."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import xxhash

from megalite.checkpoint.store.manifest import INDEX, MANIFEST

DATA = "__0_0.distcp"
Fields = dict[str, Any]


def tamper(
    path: Path, change: Callable[[dict[str, Any]], object] = lambda fields: None, drop: Collection[str] = ()
) -> None:
    """Take sizes and hashes of all files but `drop` anew, then `change` the fields of the manifest in `path`."""
    fields = json.loads((path / MANIFEST).read_text())
    fields["files"] = {name: described(path / name) for name in fields["files"] if name not in drop}
    change(fields)
    fields.pop("digest", None)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
    (path / MANIFEST).write_text(json.dumps({**fields, "digest": digest}, indent=2) + "\n")


def described(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"bytes": len(content), "xxh128": xxhash.xxh128_hexdigest(content)}


def setting(*keys: str | int, value: object) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        for key in keys[:-1]:
            fields = fields[key]  # type: ignore[index]
        fields[keys[-1]] = value  # type: ignore[index]

    return change


def naming(name: object) -> Callable[[Fields], None]:
    return lambda fields: fields["files"].update({name: {"bytes": 3, "xxh128": "0" * 32}})


def lacking(*keys: str) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        del fields[keys[-1]]

    return change


SOURCE = {"path": "a", "weight": 1.0, "tokens": 5, "fingerprint": "ff"}
MANIFESTS: dict[str, tuple[Callable[[Fields], None], str]] = {
    "another step": (setting("step", value=11), "is of step 11, not of step-00000010"),
    "a step in text": (setting("step", value="10"), "'step' = '10': must be a whole number from 0"),
    "a step that is true": (setting("step", value=True), "'step' = True: must be a whole number"),
    "half a step": (setting("step", value=10.0), "'step' = 10.0: must be a whole number"),
    "a negative step": (setting("step", value=-10), "'step' = -10"),
    "a step of 4000 digits": (setting("step", value=10**4000), "'step' = 1000"),
    "no step": (lacking("step"), "'step' is missing"),
    "no format": (lacking("format"), "has no format"),
    "a format in text": (setting("format", value="2"), "has no format"),
    "format 0": (setting("format", value=0), "has no format"),
    "no time": (setting("saved", value="yesterday"), "'saved' = 'yesterday': must be a time in ISO 8601"),
    "a time before time": (setting("saved", value="0001-01-01T00:00:00+23:59"), "must be a time"),
    "no ranks": (setting("ranks", value=0), "'ranks' = 0"),
    "a layout of another kind": (setting("layout", value=[1, 2]), "'layout' = [1, 2]: must be an object"),
    "a layout with another axis": (setting("layout", "ep", value=2), "'layout': 'ep' is unknown"),
    "a layout without an axis": (lacking("layout", "tp"), "'layout': 'tp' is missing"),
    "an axis of zero": (setting("layout", "tp", value=0), "'layout': 'tp' = 0: must be a whole number from 1"),
    "ranks that nobody knows": (setting("ranks", value=None), "of ranks and layout, only one is null"),
    "tokens that nobody knows": (setting("tokens", value=None), "tokens is null, though megalite has saved"),
    "versions that are numbers": (setting("versions", "torch", value=2), "'torch' = 2: must be text"),
    "a configuration in text": (setting("config", value="model"), "'config' = 'model': must be a section"),
    "an unusable configuration": (
        setting("config", "model", "layers", value="4"),
        "config: model.layers = '4': must be",
    ),
    "a model without heads": (
        setting("config", "model", "heads", value=0),
        "config: model.heads = 0: must be at least 1",
    ),
    "heads that do not fit": (setting("config", "model", "heads", value=7), "config: model.heads = 7: must"),
    "a section that is none": (setting("config", "model", value=4), "config: model = 4: must be a section"),
    "data that is no list": (setting("data", value={}), "'data' = {}: must be a list"),
    "a source that is none": (setting("data", value=[3]), "'data'[0] = 3: must be an object"),
    "a source with more": (setting("data", value=[{**SOURCE, "x": 1}]), "'data'[0]: 'x' is unknown"),
    "a weight of nothing": (setting("data", value=[{**SOURCE, "weight": 0}]), "'weight' = 0: must be a number above 0"),
    "an endless weight": (setting("data", value=[{**SOURCE, "weight": float("inf")}]), "'weight' = inf"),
    "a weight that is none": (setting("data", value=[{**SOURCE, "weight": float("nan")}]), "'weight' = nan"),
    "no files": (setting("files", value={}), f"files: {INDEX} is not among them"),
    "files that are a list": (setting("files", value=[DATA]), "'files' = ['__0_0.distcp']: must be an object"),
    "a file that is a number": (setting("files", DATA, value=3), f"'{DATA}' = 3: must be an object"),
    "a file without hash": (lacking("files", DATA, "xxh128"), "'xxh128' is missing"),
    "a hash of another kind": (setting("files", DATA, "xxh128", value="0" * 31), "must be 32 digits from 0 to f"),
    "fewer bytes": (setting("files", DATA, "bytes", value=2), f"{DATA} has 3 bytes instead of 2"),
    "negative bytes": (setting("files", DATA, "bytes", value=-3), "'bytes' = -3"),
    "no index": (lacking("files", INDEX), f"files: {INDEX} is not among them"),
    "a file that is not there": (naming("more.distcp"), "more.distcp is missing"),
    **{
        f"a file named {name[:9]!r}": (naming(name), "is no name of a file of a checkpoint")
        for name in (
            "/etc/passwd",
            "../x",
            "a/b",
            "..",
            ".",
            "",
            "a\0b",
            "a\n",
            "ä",
            "\ud800",
            "x" * 256,
            MANIFEST,
            "C:x",
        )
    },
}
