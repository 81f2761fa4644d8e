"""The folder of a run's checkpoints on one node: who may touch it, its room, what is in it. Imports no torch.

`PATH/RUN/LIFE/step-XXXXXXXX`. RUN is an identity that the run folder keeps, so that a run reads nothing of another one
of the same name. LIFE counts starts and rollbacks: what an earlier one has saved is not of the present course of the
run, though a node may come back that still has it.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import xxhash

from megalite.base.errors import InputError
from megalite.base.files import exists, is_folder, read_object, write_object
from megalite.checkpoint.store.disk import DamagedError, File, check_size, read_whole, synchronize
from megalite.checkpoint.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, complete, step_of

IDENTITY = "local.json"  # in the run's folder of checkpoints: the identity, and the present life
MAX_IDENTITY_BYTES = 1000  # bytes
RUN_IDENTITY = re.compile("[0-9a-f]{32}")
KEPT_CHECKPOINTS = 2  # complete checkpoints; the older one goes when the next begins
MAX_CHECKPOINTS = KEPT_CHECKPOINTS + 1  # at most: while one is copied to the shared folder, and a new one is written
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")  # file systems that are in memory


@dataclass(frozen=True)
class Life:
    """The present course of a run, from one start or rollback to the next."""

    run: str
    number: int

    @staticmethod
    def of(folder: Path) -> "Life | None":
        """The life of the run whose checkpoints are in `folder`; None if it never had local ones, or its record is
        damaged."""
        try:
            found = read_object(folder / IDENTITY, MAX_IDENTITY_BYTES) if exists(folder / IDENTITY) else {}
        except InputError:  # damaged: nothing on the nodes can be told to be of this run
            return None
        run, number = found.get("run"), found.get("life")
        if not (isinstance(run, str) and RUN_IDENTITY.fullmatch(run) and type(number) is int and 0 < number < 1 << 62):
            return None
        return Life(run, number)

    @staticmethod
    def begin(folder: Path) -> "Life":
        """Begin a new life. Raises InputError if that cannot be written down."""
        before = Life.of(folder)
        life = Life(before.run, before.number + 1) if before else Life(token_hex(16), 1)
        write_object(folder / IDENTITY, {"run": life.run, "life": life.number})
        return life


@dataclass(frozen=True)
class Held:
    """Files of one checkpoint that one node has."""

    step: int
    saved: str  # when
    digest: str  # hash of the manifest: two nodes may have saved a step in different ways
    total: int  # files of the whole checkpoint
    names: tuple[str, ...]  # files that are here in full size


class LocalFolder:
    """The local folder of one life of a run. `root`: the folder that `checkpoint.local.path` names."""

    def __init__(self, root: Path, life: Life) -> None:
        self.root, self.run = root, root / life.run
        self.folder = self.run / f"life-{life.number:06d}"

    def path_of(self, step: int) -> Path:
        """Path of a step's checkpoint once it is complete."""
        return self.folder / f"step-{step:08d}"

    def partial_of(self, step: int, token: int) -> Path:
        """Path of a step's checkpoint while it is written; `token`: a number that no other save has."""
        return self.folder / f"step-{step:08d}.partial.{token}"

    def prepare(self, mark: str) -> None:
        """Make the folder, and delete what earlier lives have left. Raises OSError and InputError.

        mark: a name by which nodes find out if they share the folder.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        mode = self.root.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise InputError(f"{self.root}: anybody may rename what is in it; chmod o-w or +t it, or name another")
        _own(self.run)
        for other in self.run.iterdir():
            if other != self.folder:
                _delete(other)
        _own(self.folder)
        (self.folder / mark).touch(mode=0o600)

    def marks(self) -> list[str]:
        """The marks of all nodes that have prepared this folder."""
        return sorted(path.name for path in self.folder.glob("node-*"))

    def make_way(self, partial: Path, pinned: int | None) -> None:
        """Make the folder `partial`, and room for it: of older checkpoints, the newest and that of `pinned` stay."""
        _own(self.run)
        _own(self.folder)
        kept = complete(self.folder)[1 - KEPT_CHECKPOINTS :] + ([] if pinned is None else [self.path_of(pinned)])
        for path in self.folder.glob("step-*"):
            if path not in kept:
                _delete(path)
        partial.mkdir(mode=0o700)

    def publish(self, partial: Path, final: Path) -> None:
        """Give a checkpoint its name."""
        synchronize(partial)
        partial.rename(final)
        synchronize(self.folder)

    def discard(self, partial: Path) -> None:
        """Delete what was written of a checkpoint. The next save tries again what could not be deleted."""
        with suppress(OSError):
            _delete(partial)

    def forget(self) -> None:
        """Delete all that the run has here. Raises OSError."""
        if is_folder(self.run, follow=False):
            shutil.rmtree(self.run)

    def held(self) -> Iterator[Held]:
        """Yield what is here of each checkpoint; only sizes are looked at. Unreadable checkpoints are left out."""
        if not (_is_own(self.run) and _is_own(self.folder)):
            return
        for path in complete(self.folder):
            try:
                text = read_whole(path, MANIFEST, MAX_MANIFEST_BYTES)
                manifest = Manifest.parse(path, text)
            except InputError:  # damage, or another format
                continue
            names = tuple(_whole(path, manifest.files.items()))
            yield Held(step_of(path), manifest.saved, digest_of(text), len(manifest.files), names)

    def room(self) -> int:
        """Free bytes for this user."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    @property
    def in_memory(self) -> bool:
        """Flag: the folder is in host memory, as /dev/shm is. If Linux does not say, a disk is assumed."""
        real, best, kind = os.path.realpath(self.folder), "", ""
        try:
            lines = Path("/proc/self/mounts").read_text().splitlines()
        except OSError:
            return False
        for _, at, found, *_ in map(str.split, lines):
            at = at.replace("\\040", " ")
            if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
                best, kind = at, found
        return kind in MEMORY_FILE_SYSTEMS


def digest_of(text: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(text)


def _whole(path: Path, files: Iterable[tuple[str, File]]) -> Iterator[str]:
    for name, file in files:
        try:
            check_size(path, name, file)
        except DamagedError:
            continue
        yield name


def _own(folder: Path) -> None:
    """Make a folder that only this user can look into. Raises InputError if there is something else of that name."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(folder):
        raise InputError(f"{folder}: must be a folder of this user that nobody else can open (mode 0700), and no link")


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _delete(path: Path) -> None:
    if is_folder(path, follow=False):
        shutil.rmtree(path)
    else:
        path.unlink()
