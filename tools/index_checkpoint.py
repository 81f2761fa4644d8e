"""Giving an index to what has none, for `megalite-inspect-checkpoint index`."""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from megalite.checkpoint.disk import File, check_hashes, damage_of, measure, synchronize
from megalite.checkpoint.files import METADATA
from megalite.checkpoint.manifest import INDEX, MANIFEST, NAME, WITHOUT_INDEX, Manifest, OldFormatError, step_of
from megalite.config.convert import to_plain
from megalite.config.errors import InputError
from megalite.config.files import exists, write_whole
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite_tools.checkpoints import find
from megalite_tools.dcp_index import dcp_index
from megalite_tools.terminal import Terminal


def index(options: argparse.Namespace, terminal: Terminal) -> tuple[dict[str, Any], bool]:
    """Prints what became of the checkpoints `options.paths`; that, for JSON, and that all is well."""
    results = []
    for path in [checkpoint for given in options.paths for checkpoint in _meant(given)]:
        left_out = _index(path, options.config)
        if left_out is None:
            terminal.line(f"{path}: has an index")
        else:
            others = f"; left out, as no tensors: {', '.join(left_out)}" if left_out else ""
            terminal.line(f"{path}: has an index now{others}")
        results.append({"path": str(path), "written": left_out is not None, "left_out": left_out or []})
    return {"checkpoints": results}, True


def _meant(path: Path) -> list[Path]:
    """`find`, and any folder that DCP has written."""
    return [path] if exists(path / METADATA) else find(path)


def _index(path: Path, config: list[str] | None) -> list[str] | None:
    """Write index and manifest; the names of what is no tensor. None: they are there."""
    try:
        if exists(path / MANIFEST):
            Manifest.read(path)
            return None
        manifest = None
    except OldFormatError:
        manifest = Manifest.read(path, WITHOUT_INDEX)
        check_hashes(path, manifest.files)
    found, left_out = dcp_index(path)
    if manifest is None:
        manifest = _manifest(path, found.files, config)
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    with damage_of(path, METADATA):
        found.check(sizes, found.tensors)
    content = found.encode()
    file = File(len(content), xxhash.xxh3_128_hexdigest(content))
    write_whole(path / INDEX, content)
    write_whole(path / MANIFEST, replace(manifest, files={**manifest.files, INDEX: file}).render())
    synchronize(path)
    return left_out


def _manifest(path: Path, files: Iterable[str], config: list[str] | None) -> Manifest:
    """Of what another program has written."""
    if config is None:
        raise InputError(f"{path}: has no {MANIFEST}; give the configuration of its model with --config")
    return Manifest(
        step=step_of(path) if NAME.fullmatch(path.absolute().name) else 0,
        tokens=0,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks=1,
        layout=vars(Layout()),
        versions={"megalite": version("megalite")},
        config=to_plain(load(config)),
        data=(),
        files={name: measure(path, name) for name in (*files, METADATA)},
    )
