"""The files of a checkpoint on the disk: opening, measuring, hashing, synchronizing. Imports no torch.

Only a plain file in the checkpoint's own folder is opened. Links, pipes and devices count as damage, and so does
anything that the system refuses.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megalite.base.errors import InputError
from megalite_launch.base.files import opened as opened_own

BLOCK = 1 << 20  # bytes hashed at a time: what a cache holds
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class DamagedError(InputError):
    """A checkpoint is not as it was written."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what = path, what

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        return DamagedError, (self.path, self.what)  # ranks tell each other


@dataclass(frozen=True)
class File:
    """The size and hash of a file when it was written."""

    bytes: int
    xxh128: str  # as xxh128sum prints it. Against decay, not malice: who changes files can change their hashes


@contextmanager
def opened(path: Path, name: str, links: bool = False) -> Iterator[int]:
    """A descriptor of the file `name` of the checkpoint `path`. Raises DamagedError, also for errors in the block.

    links: whether the file may be a link.
    """
    with _readable(path, name):
        with damage_of(path, name):  # a name may have a null byte
            descriptor = os.open(path / name, FLAGS & ~os.O_NOFOLLOW if links else FLAGS)
        try:
            _check_plain(path, name, os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)


def check_size(path: Path, name: str, file: File) -> None:
    """Raises DamagedError unless the checkpoint `path` has the file `name`, in its full size."""
    with _readable(path, name):
        found = os.lstat(path / name)
    _check_plain(path, name, found)
    if found.st_size != file.bytes:
        raise DamagedError(path, f"{name} has {found.st_size} bytes instead of {file.bytes}")


def check_hashes(path: Path, files: dict[str, File], advanced: Callable[[int], None] = lambda _: None) -> None:
    """Read `files` and compare them with their hashes. Raises DamagedError.

    advanced: called with the number of bytes read.
    """
    for name, file in files.items():
        _check_hash(path, name, file, measure(path, name, advanced).xxh128)


def measure(path: Path, name: str, advanced: Callable[[int], None] = lambda _: None) -> File:
    """The size and hash of a file as it is now; `advanced` is called with the bytes read. Raises DamagedError."""
    digest, size = xxhash.xxh3_128(), 0
    with opened(path, name) as descriptor:
        block = memoryview(bytearray(min(BLOCK, os.fstat(descriptor).st_size + 1)))
        while count := os.readv(descriptor, [block]):
            digest.update(block[:count])
            size += count
            advanced(count)
    return File(size, digest.hexdigest())


def read_whole(path: Path, name: str, limit: int, file: File | None = None, links: bool = False) -> bytes:
    """The content of a file of at most `limit` bytes. Raises DamagedError, also if it differs from `file`.

    links: whether the file may be a link.
    """
    with opened(path, name, links) as descriptor:
        if (size := os.fstat(descriptor).st_size) > limit:
            raise DamagedError(path, f"{name} has {size} bytes; at most {limit} are read")
        content = bytearray(size)
        read_at(path, name, descriptor, memoryview(content), 0)
    if file is not None:
        _check_hash(path, name, file, xxhash.xxh3_128_hexdigest(content))
    return bytes(content)


def read_at(path: Path, name: str, descriptor: int, target: memoryview, position: int) -> None:
    """Fill `target` with the bytes that begin at `position`. Raises DamagedError if the file ends too early."""
    while target:
        if not (count := os.preadv(descriptor, [target], position)):
            raise DamagedError(path, f"{name} ends early, at byte {position}")
        target, position = target[count:], position + count


def share_of(files: dict[str, File], rank: int, ranks: int) -> dict[str, File]:
    """The files that one of `ranks` readers takes: about as many bytes as any other reader."""
    loads, shares = [0] * ranks, [dict[str, File]() for _ in range(ranks)]
    for name, file in sorted(files.items(), key=lambda item: -item[1].bytes):
        least = loads.index(min(loads))
        loads[least] += file.bytes
        shares[least][name] = file
    return shares[rank]


def total_bytes(files: Iterable[File]) -> int:
    return sum(file.bytes for file in files)


def write_durably(path: Path, text: str) -> None:
    """Write a file, which is then on the disk. Its name is there once its folder is synchronized."""
    with open(opened_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def synchronize(folder: Path) -> None:
    """Flush the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def damage_of(path: Path, name: str) -> Iterator[None]:
    """Turn a ValueError, which says what is wrong with the file `name`, into a DamagedError."""
    try:
        yield
    except DamagedError:
        raise
    except ValueError as error:
        raise DamagedError(path, f"{name} {error}") from None


@contextmanager
def _readable(path: Path, name: str) -> Iterator[None]:
    """Turn errors of the system into DamagedError."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(path, f"{name} is missing") from None
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise DamagedError(path, f"{name} {why}") from error


def _check_plain(path: Path, name: str, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise DamagedError(path, f"{name} is a link")
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(path, f"{name} is no regular file")


def _check_hash(path: Path, name: str, file: File, digest: str) -> None:
    if digest != file.xxh128:
        raise DamagedError(path, f"{name} does not have the hash it was written with")
