"""Gives an index to checkpoints that have none, for `megalite-inspect-checkpoint index`."""

import argparse
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from megalite.base.errors import InputError
from megalite.base.files import exists, write_whole
from megalite.checkpoint.store.disk import DamagedError, File, check_hashes, damage_of, measure, read_whole, synchronize
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.index import MAX_INDEX_BYTES, Index
from megalite.checkpoint.store.manifest import (
    FORMAT_WITHOUT_INDEX,
    INDEX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STEP_NAME,
    Manifest,
    OldFormatError,
    config_problems,
    step_of,
)
from megalite.checkpoint.weights.formats.dcp_index import dcp_index
from megalite.checkpoint.weights.missing_tensors import differences_from
from megalite.checkpoint.weights.reader import Reader
from megalite.config.convert import to_plain
from megalite.config.load import load
from megalite.config.schema import Config
from megalite_tools.checkpoint.checkpoints import find
from megalite_tools.terminal import Terminal


def index(options: argparse.Namespace, terminal: Terminal) -> tuple[dict[str, Any], bool]:
    """Prints what was done to the checkpoints `options.paths`. Returns that for JSON, and True."""
    config = None if options.config is None else _model_of(options.config)
    results = []
    for path in [checkpoint for given in options.paths for checkpoint in _meant(given)]:
        done, left_out = _index(path, config)
        others = f"; left out, as no tensors: {', '.join(left_out)}" if left_out else ""
        terminal.line(f"{path}: {done or 'has an index'}{others}")
        results.append({"path": str(path), "written": done is not None, "left_out": left_out})
    return {"checkpoints": results}, True


def _model_of(files: list[str]) -> Config:
    """The configuration in `files`. Raises InputError if its model is not valid."""
    config = load(files)
    if problems := list(config_problems(to_plain(config))):
        raise InputError(problems)
    return config


def _meant(path: Path) -> list[Path]:
    """Find checkpoints as `find` does; `path` may also be a folder that DCP has written."""
    return [path] if exists(path / METADATA) else find(path)


def _index(path: Path, config: Config | None) -> tuple[str | None, list[str]]:
    """Write the files that `path` lacks. Returns what was done, None for nothing, and names that are no tensors."""
    if not exists(path / MANIFEST, follow=False):
        return "has an index now", _take_in(path, config)
    try:
        manifest = Manifest.read(path)
    except OldFormatError:
        manifest = Manifest.read(path, FORMAT_WITHOUT_INDEX)
        _refuse_config(path, config, manifest)
        check_hashes(path, manifest.files)
        found, left_out = _indexed(path)
        _write(path, found, manifest)
        return "has an index now", left_out
    _refuse_config(path, config, manifest)
    if config is None or to_plain(config) == manifest.config:
        return None, []
    _refuse_other_model(path, Reader.of_checkpoint(path, manifest).index, config)
    _write_manifest(path, replace(manifest, config=to_plain(config)))
    return "has this configuration now", []


def _take_in(path: Path, config: Config | None) -> list[str]:
    """Write index and manifest for a folder of another program. Returns the names of entries that are no tensors."""
    if config is None:
        raise InputError(f"{path}: has no {MANIFEST}; give the configuration of its model with --config")
    found, left_out = _indexed(path)
    _refuse_other_model(path, found, config)
    manifest = Manifest(
        step=step_of(path) if STEP_NAME.fullmatch(path.absolute().name) else 0,
        tokens=None,
        saved=_time_of(path / METADATA).isoformat(timespec="seconds"),
        ranks=None,
        layout=None,
        versions={},
        config=to_plain(config),
        data=(),
        files={name: measure(path, name) for name in (*found.files, METADATA)},
    )
    _write(path, found, manifest)
    return left_out


def _indexed(path: Path) -> tuple[Index, list[str]]:
    """Call `dcp_index`. Raises InputError if `path` has another program's INDEX file, which somebody may need."""
    if exists(path / INDEX, follow=False):
        try:
            Index.decode(read_whole(path, INDEX, MAX_INDEX_BYTES))  # an interrupted attempt of ours may have left one
        except ValueError:
            raise InputError(f"{path}: has another program's {INDEX}, which is not overwritten; move it away") from None
    return dcp_index(path)


def _refuse_config(path: Path, config: Config | None, manifest: Manifest) -> None:
    if config is not None and not manifest.foreign:
        raise InputError(f"--config: megalite has saved {path} with a configuration of its own; leave --config out")


def _refuse_other_model(path: Path, found: Index, config: Config) -> None:
    if differ := differences_from(found, config.model):
        raise InputError(f"--config: {path} does not hold this model: {differ}")


def _write(path: Path, index: Index, manifest: Manifest) -> None:
    """Write an index, and the manifest that names it, after a check that both can be read again."""
    content, sizes = index.encode(), {name: file.bytes for name, file in manifest.files.items()}
    with damage_of(path, METADATA):
        if len(content) > MAX_INDEX_BYTES:
            raise ValueError(f"makes an index of {len(content)} bytes; at most {MAX_INDEX_BYTES} are read")
        Index.decode(content).check(sizes, index.tensors)
    file = File(len(content), xxhash.xxh3_128_hexdigest(content))
    _write_manifest(path, replace(manifest, files={**manifest.files, INDEX: file}), content)


def _write_manifest(path: Path, manifest: Manifest, index: bytes | None = None) -> None:
    text = manifest.render()
    try:
        Manifest.parse(path, text.encode())
    except DamagedError as error:
        raise InputError(f"{path}: cannot have a manifest: {error.what}") from None
    if len(text) > MAX_MANIFEST_BYTES:
        raise InputError(f"{path}: its manifest would have {len(text)} bytes; at most {MAX_MANIFEST_BYTES} are read")
    if index is not None:
        write_whole(path / INDEX, index)
    write_whole(path / MANIFEST, text)
    synchronize(path)


def _time_of(file: Path) -> datetime:
    try:
        return datetime.fromtimestamp(file.lstat().st_mtime, UTC)
    except (ValueError, OverflowError):  # file systems may report any number
        return datetime.now(UTC)
