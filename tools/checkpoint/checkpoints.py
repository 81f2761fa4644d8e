"""Checkpoints as files: which of them exist, and their states."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import exists, is_folder
from megalite.checkpoint.run.tensors import Checkpoint
from megalite.checkpoint.store.disk import DamagedError, check_hashes, check_size
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.manifest import MANIFEST, STEP_NAME, Manifest, check_sizes, complete
from megalite.checkpoint.store.retain import DAMAGED_SUFFIX, DELETED_SUFFIX, PARTIAL_SUFFIX, check_folder
from megalite.config.layout import Layout

STATES = {  # by the end of a folder's name: state, reason
    PARTIAL_SUFFIX: ("partial", "being written, or left by an interrupted save"),
    DELETED_SUFFIX: ("being deleted", "the next save goes on with it"),
    DAMAGED_SUFFIX: ("set aside", ""),
}
FOLDER = re.compile(rf"{STEP_NAME.pattern}(?:({'|'.join(map(re.escape, STATES))})(?:\.\d+)?)?")


@dataclass(frozen=True)
class Entry:
    """A folder among the checkpoints of a run."""

    path: Path
    step: int
    state: str  # complete, damaged, of another format, or one of STATES
    why: str
    bytes: int  # on the disk
    manifest: Manifest | None  # None if it is damaged or of another format


def survey(path: Path) -> list[Entry]:
    """All folders among the checkpoints of a run, oldest first. File sizes are compared, but not hashes."""
    folder = _folder_of(path)
    named = {child: FOLDER.fullmatch(child.name) for child in folder.iterdir()}
    folders = sorted((int(match[1]), child, match[2]) for child, match in named.items() if match)
    entries = [_examine(child, step, suffix) for step, child, suffix in folders]
    if not (found := [entry for entry in entries if entry is not None]):
        if _is_checkpoint(path):
            raise InputError(
                f"{path}: is a checkpoint itself; `show` tells what it holds, and list takes its run folder"
            )
        raise InputError(f"{folder}: holds no checkpoint; give a run folder")
    return found


def find(path: Path) -> list[Path]:
    """The checkpoints at `path`, oldest first: the one given, or all complete ones of a run."""
    if _is_checkpoint(path):
        return [path]
    folder = _folder_of(path)
    if not (found := complete(folder)):
        raise InputError(f"{folder}: holds no checkpoint; give a run folder, or one of its checkpoints")
    return found


def damage(path: Path, manifest: Manifest, advanced: Callable[[int], None]) -> list[str]:
    """Messages about damage to the files of a checkpoint, which are read in full.

    advanced: called with the number of bytes read.
    """
    found = []
    for name, file in manifest.files.items():
        try:
            check_size(path, name, file)
            check_hashes(path, {name: file}, advanced)
        except DamagedError as error:
            found.append(error.what)
    return found or _misplaced(path)


def _misplaced(path: Path) -> list[str]:
    """Messages about wrong positions of tensors in the index of a checkpoint whose files are not damaged."""
    try:
        checkpoint = Checkpoint(path)
        checkpoint.check_locations()
        checkpoint.progress()
    except DamagedError as error:
        return [error.what]
    return []


def choose(names: Iterable[str], pattern: str) -> list[str]:
    """The names that match `pattern`, by the rules for file names. Raises InputError if none does."""
    if not (chosen := [name for name in names if fnmatchcase(name, pattern)]):
        raise InputError(f"--tensors {pattern}: no tensor has such a name")
    return chosen


def layout_of(manifest: Manifest) -> str:
    return "of another program" if manifest.layout is None else str(Layout(**manifest.layout))


def saved_at(manifest: Manifest) -> str:
    return f"{datetime.fromisoformat(manifest.saved).astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _is_checkpoint(path: Path) -> bool:
    named = STEP_NAME.match(os.path.basename(os.path.realpath(path))) is not None
    return is_folder(path) and (named or exists(path / MANIFEST))


def _folder_of(path: Path) -> Path:
    """The folder of checkpoints: `path`, or the one in the run folder `path`."""
    if not is_folder(path):
        raise InputError(f"{path}: no such folder")
    if exists(path / METADATA) and not exists(path / MANIFEST):
        raise InputError(
            f"{path}: is a folder of PyTorch Distributed Checkpoint, but no megalite checkpoint: it has no {MANIFEST}"
        )
    inside = path / "checkpoints"
    return inside if is_folder(inside) else path


def _examine(path: Path, step: int, suffix: str | None) -> Entry | None:
    """The entry for a folder; None if a run that goes on has deleted it meanwhile."""
    manifest = None
    state, why = "complete", ""
    try:
        check_folder(path)
        manifest = Manifest.read(path)
        check_sizes(path)
    except DamagedError as error:
        state, why = "damaged", error.what
    except InputError as error:
        state, why = "of another format", str(error)
    if suffix is not None:
        state, why = STATES[suffix][0], STATES[suffix][1] or why
    try:
        size = (
            sum(file.lstat().st_size for file in path.iterdir())
            if is_folder(path, follow=False)
            else path.lstat().st_size
        )
    except FileNotFoundError:
        return None
    return Entry(path, step, state, why, size, manifest)
