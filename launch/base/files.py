"""Files in folders that somebody else may have prepared: no link is followed, no pipe is waited for.

`LINKS` lists what may be a link in the folder of a run. Everything else there is a file or a folder itself.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Optional, Union

LINKS = ("checkpoints", "export")  # in a run folder, to other storage; in there, links are left alone
PRIVATE_MODE = 0o600  # records: paths, commands and errors are nobody else's business
SHARED_MODE = 0o666  # pages and results; the umask takes from it


def write_whole(
    path: Path,
    content: Union[str, bytes],
    mode: int = PRIVATE_MODE,
    give_name: Callable[[Path, Path], object] = os.replace,
    durable: bool = True,
) -> None:
    """Write a file of this content, as `new_file` does. Raises OSError."""
    with new_file(path, mode, give_name, durable) as file:
        file.write(content if isinstance(content, bytes) else content.encode(errors="replace"))


@contextmanager
def new_file(
    path: Path,
    mode: int = PRIVATE_MODE,
    give_name: Callable[[Path, Path], object] = os.replace,
    durable: bool = True,
) -> Iterator[IO[bytes]]:
    """A file to write, which is whole, and on the disk, as soon as it has its name. Raises OSError.

    A link at `path` is replaced; its target stays. give_name: called with the file and `path`. durable: False for a
    file that is soon replaced, whose writer waits for no disk.
    """
    hidden = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}")  # which nobody could foresee
    try:
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(descriptor)
        give_name(hidden, path)
    except OSError as error:
        raise error if error.filename else OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            hidden.unlink()


def give_new_name(hidden: Path, path: Path) -> None:
    """Give a file the name `path`, for `write_whole`. Raises FileExistsError if one has it, even since a moment ago."""
    try:
        os.link(hidden, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        path.open("xb").close()
        hidden.replace(path)


def opened(path: Union[str, Path], flags: int, mode: int = SHARED_MODE) -> int:
    """A descriptor of a regular file. Raises OSError, with the reason as its `strerror`.

    One that is written to must be no link and have no second name, which could be that of a file elsewhere.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR) != 0
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC, mode)  # not before it is known whose content goes
    except OSError as error:
        if writes and error.errno in (errno.ELOOP, errno.ENXIO):
            why = "is a link, which is not followed" if os.path.islink(path) else "is no regular file"
            raise OSError(error.errno, why, str(path)) from None
        raise
    found = os.fstat(descriptor)
    told = "" if stat.S_ISREG(found.st_mode) else "is no regular file"
    if writes and not told and found.st_nlink > 1:
        told = "has a second name, a hard link"
    if told:
        os.close(descriptor)
        raise OSError(errno.EINVAL, told, str(path))
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def appended(path: Path, mode: int = SHARED_MODE) -> IO[bytes]:
    """A file opened to add to its end, without a buffer; it is made if it is not there. As `opened`."""
    return open(opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode), "ab", buffering=0)


def kept(log: Path) -> IO[bytes]:
    """A log opened as by `appended`, or nothing where that cannot be: no reason to end a job."""
    try:
        return appended(log)
    except OSError:
        return open(os.devnull, "ab", buffering=0)


def read_bytes(path: Union[str, Path], most: int = -1) -> bytes:
    """The first `most` bytes of a regular file, or all; a link is followed. Raises OSError."""
    with open(opened(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def read_end(path: Union[str, Path], most: int) -> bytes:
    """The last `most` bytes of a regular file, or all; a link is followed. Raises OSError."""
    with open(opened(path, os.O_RDONLY), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def foreign(path: Path) -> Optional[str]:
    """Name what would write other files at a path: a link, or a file of several names; None where neither is."""
    try:
        found = path.lstat()
    except OSError:
        return None
    if stat.S_ISLNK(found.st_mode):
        if path.name not in LINKS:
            return "is a link; put what it leads to in its place"
        return None if found.st_uid in (0, os.geteuid()) else "is a link of another user; put your own in its place"
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return "has a second name, a hard link; put a copy in its place"
    return None
