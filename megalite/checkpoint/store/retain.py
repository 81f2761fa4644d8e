"""Keeps the wanted checkpoints of a run, deletes the others. Leaves links alone: their targets are not the run's."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Container
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import is_folder
from megalite.checkpoint.store.disk import DamagedError, synchronize
from megalite.checkpoint.store.manifest import STEP_NAME, Manifest, check_sizes, complete, step_of

PARTIAL_SUFFIX = ".partial"  # being written
DELETED_SUFFIX = ".deleted"  # being deleted
DAMAGED_SUFFIX = ".damaged"  # set aside; people decide what becomes of it
LEFTOVER_NAME = re.compile(rf"{STEP_NAME.pattern}({re.escape(PARTIAL_SUFFIX)}|{re.escape(DELETED_SUFFIX)})(\.[0-9]+)?")


def retain(folder: Path, newest: int, keep: int, every: int, at: Container[int] = ()) -> list[str]:
    """Delete all checkpoints or exports but the newest `keep` and those of every `every`-th step, and half-done ones.

    Returns what could not be deleted, and why. newest: the step that is durable now; checkpoints of later steps are not
    this run's, and stay. keep: 0 keeps all. every: 0 keeps none forever. at: further steps that
    stay. Raises InputError if `folder` cannot be read.
    """
    problems = []
    own = [path for path in complete(folder) if _is_folder(path) and step_of(path) <= newest]
    for path in own[:-keep] if keep else []:
        step = step_of(path)
        if (every == 0 or step % every) and step not in at:
            problems += _refused(path, lambda path: _rename(path, DELETED_SUFFIX))
    return problems + sweep(folder)


def make_room(path: Path) -> None:
    """Take the folder `path`, if there is one, from its name in one operation; `sweep` deletes it."""
    if _is_folder(path):
        _rename(path, DELETED_SUFFIX)


def sweep(folder: Path) -> list[str]:
    """Delete what interrupted saves and deletions have left. Returns what could not be deleted, and why."""
    left = [path for path in folder.glob("step-*") if LEFTOVER_NAME.fullmatch(path.name) and _is_folder(path)]
    return [problem for path in sorted(left) for problem in _refused(path, shutil.rmtree)]


def new_partial(final: Path) -> Path:
    """Make the folder in which the checkpoint `final` is written. No other process ever gets the same one."""
    partial = final.with_name(f"{final.name}{PARTIAL_SUFFIX}.{secrets.randbits(48)}")
    partial.mkdir(parents=True)
    return partial


def _refused(path: Path, delete: Callable[[Path], object]) -> list[str]:
    try:
        delete(path)
    except FileNotFoundError:  # somebody else was quicker
        return []
    except OSError as error:
        return [f"{path} cannot be deleted: {error.strerror or error}"]
    return []


def check_own(path: Path) -> Manifest:
    """Check a checkpoint of the run's own as `check_sizes` does; it must be no link. Raises DamagedError."""
    check_folder(path)
    return check_sizes(path)


def check_folder(path: Path) -> None:
    """Raises DamagedError unless `path` is a folder itself; a link to one is not."""
    if not _is_folder(path):
        raise DamagedError(
            path, "is a link or a file instead of a folder; checkpoint.resume takes paths from elsewhere"
        )


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that no run takes it. Returns the new path. Raises OSError if that is refused."""
    aside = _rename(path, DAMAGED_SUFFIX)
    synchronize(path.parent)
    return aside


def _rename(path: Path, suffix: str) -> Path:
    """Rename in one operation, so that no half of it looks whole; a number is added if the new name is taken."""
    renamed, count = path.with_name(path.name + suffix), 1
    while os.path.lexists(renamed):
        count += 1
        renamed = path.with_name(f"{path.name}{suffix}.{count}")
    return path.rename(renamed)


def refuse_only_damaged(folder: Path, aside: Collection[Path]) -> None:
    """Raises InputError if there are damaged checkpoints, and so no intact one. aside: further ones than `damaged`."""
    if found := [*damaged(folder), *sorted(aside)]:
        raise InputError(
            f"{folder} holds no intact checkpoint, but {found[-1].name}, which is damaged; "
            "train from the beginning with checkpoint.resume=never, or give run.name another name"
        )


def damaged(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that were set aside."""
    return sorted(folder.glob(f"step-*{DAMAGED_SUFFIX}*"))


def _is_folder(path: Path) -> bool:
    """Return whether `path` is a folder itself, not a link to one."""
    return is_folder(path, follow=False)
