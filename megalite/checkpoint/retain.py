"""Which checkpoints of a run stay, and how the others go. Links are left alone: what they name is not the run's."""

import os
import shutil
from pathlib import Path

from megalite.checkpoint.disk import DamagedError, synchronize
from megalite.checkpoint.manifest import NAME, Manifest, check_sizes, complete, step_of
from megalite.config.files import is_folder

PARTIAL = ".partial"  # being written
DELETED = ".deleted"  # being deleted
DAMAGED = ".damaged"  # set aside; people decide what becomes of it


def retain(folder: Path, newest: int, keep: int, every: int) -> None:
    """Delete all but the newest `keep` checkpoints and those of every `every`-th step; what was left half-done too.

    newest: the step that is durable now; what has a later one is not of this run's doing, and stays. keep: 0 keeps all.
    every: 0 keeps none forever.
    """
    own = [path for path in complete(folder) if _is_folder(path) and step_of(path) <= newest]
    for path in own[:-keep] if keep else []:
        if every == 0 or step_of(path) % every:
            path.rename(path.with_name(path.name + DELETED))  # at once, so that no half of it looks whole
    for path in folder.glob("step-*"):
        if NAME.fullmatch(path.stem) and path.suffix in (PARTIAL, DELETED) and _is_folder(path):
            shutil.rmtree(path)


def check_own(path: Path) -> Manifest:
    """`check_sizes` of a run's own checkpoint, which is a folder itself. Raises DamagedError."""
    check_folder(path)
    return check_sizes(path)


def check_folder(path: Path) -> None:
    """Raises DamagedError for a link to a folder, too."""
    if not _is_folder(path):
        raise DamagedError(
            path, "is a link or a file instead of a folder; checkpoint.resume takes paths from elsewhere"
        )


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that no run takes it; its new name. Raises OSError where that is refused."""
    aside = path.with_name(path.name + DAMAGED)
    count = 1
    while os.path.lexists(aside):
        count += 1
        aside = path.with_name(f"{path.name}{DAMAGED}.{count}")
    path.rename(aside)
    synchronize(path.parent)
    return aside


def damaged(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that were set aside."""
    return sorted(folder.glob(f"step-*{DAMAGED}*"))


def _is_folder(path: Path) -> bool:
    """Whether `path` is a folder itself, not a link to one."""
    return is_folder(path, follow=False)
