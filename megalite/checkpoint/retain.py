"""Which checkpoints of a run stay, and how the others go."""

import shutil
from pathlib import Path

from megalite.checkpoint.manifest import NAME, complete, step_of, synchronize

PARTIAL = ".partial"  # being written
DELETED = ".deleted"  # being deleted
DAMAGED = ".damaged"  # set aside; people decide what becomes of it


def retain(folder: Path, keep: int, every: int) -> None:
    """Delete all but the newest `keep` checkpoints and those of every `every`-th step; what was left half-done too.

    keep: 0 keeps all. every: 0 keeps none forever. Called when the newest is durable.
    """
    for path in complete(folder)[:-keep] if keep else []:
        if every == 0 or step_of(path) % every:
            path.rename(path.with_name(path.name + DELETED))  # at once, so that no half of it looks whole
    for path in folder.glob("step-*"):
        if NAME.fullmatch(path.stem) and path.suffix in (PARTIAL, DELETED):
            shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that no run takes it; its new name."""
    aside = path.with_name(path.name + DAMAGED)
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}{DAMAGED}.{count}")
    path.rename(aside)
    synchronize(path.parent)
    return aside


def damaged(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that were set aside."""
    return sorted(folder.glob(f"step-*{DAMAGED}*"))
