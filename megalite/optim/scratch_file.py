"""A file without a name on a drive of this node, which holds what need not outlive the process.

The file is gone when the process ends, however it ends, and no other process can open it. `read` and `write` go past
the page cache (O_DIRECT), where the file system can, so that they take the drive's rate and no memory. A tensor tells
which bytes of the file are meant. Its memory is the file's, mapped; but Linux ends a process that touches mapped memory
when the drive fails (SIGBUS), so a run never does.
"""

import logging
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, fcntl
from mmap import mmap
from secrets import token_hex
from threading import Lock
from typing import Protocol
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from megalite.base.errors import InputError, Problem, Unhealthy
from megalite.plan.state_streams import BLOCK, padded

log = logging.getLogger("megalite")
THREADS = 8  # threads of each rank that read and write files
REQUEST_BYTES = 2 << 20  # bytes that a thread moves at a time
_open = WeakSet["ScratchFile"]()


class StateFile(Protocol):
    """Holds tensors in one file. All bytes are zero at first."""

    def take(self, size: int) -> Tensor:
        """`size` bytes of the file that nobody has taken, as a tensor of bytes at a whole block."""

    def aligned(self, buffer: Tensor) -> Tensor:
        """`buffer`, of bytes, without up to a block at its ends: from an address on that `read` and `write` can use."""

    def read(self, source: Tensor, buffer: Tensor) -> None:
        """Read a part of the file into `buffer`, bytes at an aligned address that are as many, in whole blocks.

        The rest of the last block may have any content then.
        """

    def write(self, buffer: Tensor, target: Tensor) -> None:
        """Write the first bytes of `buffer`, which is as for `read`, to a part of the file."""


class ScratchFile:
    """A file of `size` bytes in `folder`, which a configuration names in `key`. See `StateFile`.

    Raises InputError where the folder cannot be used or has no room. Reading and writing raise Unhealthy when the drive
    fails: then the process has lost the content.
    """

    def __init__(self, folder: str, size: int, key: str) -> None:
        self.folder, self.key = folder, key
        self._taken = 0
        self._descriptor = _opened(folder, size, key)
        finalize(self, os.close, self._descriptor)
        self._bytes = torch.frombuffer(mmap(self._descriptor, max(size, BLOCK)), dtype=torch.uint8)
        self._start = self._bytes.data_ptr()
        self._ends: set[int] = set()  # where taken bytes end, behind which a block's rest is nobody's
        self._sharing = Lock()  # held while a block is changed that parts share
        _open.add(self)
        self.direct = _set_direct(self._descriptor)
        if not self.direct:
            log.warning("%s = %s: its file system has no O_DIRECT, so the page cache takes memory", key, folder)

    def take(self, size: int) -> Tensor:
        first, self._taken = self._taken, self._taken + padded(size)
        assert self._taken <= len(self._bytes), "more is taken than was asked for at the start"
        self._ends.add(first + size)
        return self._bytes[first : first + size]

    def aligned(self, buffer: Tensor) -> Tensor:
        first = -buffer.data_ptr() % BLOCK
        return buffer[first : first + len(buffer) - BLOCK]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the bytes of a tensor on the CPU are in this file."""
        return 0 <= tensor.data_ptr() - self._start < len(self._bytes)

    def read(self, source: Tensor, buffer: Tensor) -> None:
        first = source.data_ptr() - self._start
        if first % BLOCK == 0:
            self._move(os.preadv, "read", buffer[: padded(source.nbytes)], first)
        else:
            _, there = self._blocks_around(first, source.nbytes)
            buffer[: source.nbytes].copy_(there)

    def write(self, buffer: Tensor, target: Tensor) -> None:
        first = target.data_ptr() - self._start
        if first % BLOCK == 0 and (target.nbytes % BLOCK == 0 or first + target.nbytes in self._ends):
            self._move(os.pwritev, "written", buffer[: padded(target.nbytes)], first)
            return
        with self._sharing:
            blocks, there = self._blocks_around(first, target.nbytes)
            there.copy_(buffer[: target.nbytes])
            self._move(os.pwritev, "written", blocks, first - first % BLOCK)

    def _blocks_around(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Read the blocks that hold some bytes of the file; return them, and the bytes in them."""
        before = first % BLOCK
        blocks = pages(padded(before + size))
        self._move(os.preadv, "read", blocks, first - before)
        return blocks, blocks[before : before + size]

    def _move(self, move: Callable[[int, Sequence[memoryview], int], int], done: str, buffer: Tensor, at: int) -> None:
        """Read or write `buffer` at a byte of the file. The system may move fewer bytes at a time."""
        view, moved = buffer.numpy().data, 0
        while moved < len(view):
            try:
                count = move(self._descriptor, [view[moved:]], at + moved)
            except OSError as error:
                raise self._lost(done, at + moved, error.strerror or str(error)) from error
            if (moved + count) // BLOCK == moved // BLOCK:
                raise self._lost(done, at + moved, f"only {count} bytes at a time")
            moved = (moved + count) // BLOCK * BLOCK

    def _lost(self, done: str, at: int, reason: str) -> Unhealthy:
        return Unhealthy(
            f"{self.key} = {self.folder}: states at byte {at:,} cannot be {done}: {reason}; checkpoints are not "
            "touched: see to the drive or name another folder, and the same command goes on from the newest"
        )


def file_of(tensor: Tensor) -> ScratchFile | None:
    """The file of this process that has the bytes of a tensor; None: they are in memory."""
    return next((file for file in _open if tensor.is_cpu and file.holds(tensor)), None)


def pages(size: int) -> Tensor:
    """`size` bytes of memory at an aligned address, which go back to the system with the tensor."""
    return torch.frombuffer(mmap(-1, size), dtype=torch.uint8)


class NoFile:
    """A `StateFile` without a file, for tensors without data, whose bytes are counted."""

    def take(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def aligned(self, buffer: Tensor) -> Tensor:
        return buffer[: len(buffer) - BLOCK]

    def read(self, source: Tensor, buffer: Tensor) -> None:
        pass

    def write(self, buffer: Tensor, target: Tensor) -> None:
        pass


def _opened(folder: str, size: int, key: str) -> int:
    """The descriptor of a new file of `size` bytes in `folder` that has no name. Raises InputError."""
    try:
        if stat.S_ISLNK(os.lstat(folder).st_mode):
            raise InputError([Problem(key, "is a link", "name the folder that it leads to", folder)])
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        rule, fix = f"cannot be opened: {error.strerror}", "make this folder on every node, or name another"
        raise InputError([Problem(key, rule, fix, folder)]) from error
    try:
        descriptor = _nameless(directory)
    except OSError as error:
        rule = f"cannot be written to: {error.strerror}"
        raise InputError([Problem(key, rule, "name a folder in which you may write", folder)]) from error
    finally:
        os.close(directory)
    try:
        os.posix_fallocate(descriptor, 0, max(size, BLOCK))
    except OSError as error:
        found = os.fstatvfs(descriptor)
        os.close(descriptor)
        rule = f"has no room for {size:,} bytes of states of this rank: {error.strerror}; "
        rule += f"{found.f_bavail * found.f_frsize:,} bytes are free"
        raise InputError([Problem(key, rule, "make room, or name a folder on another drive", folder)]) from error
    return descriptor


def _nameless(directory: int) -> int:
    """A new file in a folder that never has a name; where the file system has no such, one that has lost its name."""
    with suppress(OSError):
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory)
    name = f".megalite-states-{token_hex(8)}"
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory)
    os.unlink(name, dir_fd=directory)
    return descriptor


def _set_direct(descriptor: int) -> bool:
    """Have reads and writes go past the page cache. Returns whether the file system can do that."""
    flags = fcntl(descriptor, F_GETFL)
    try:
        fcntl(descriptor, F_SETFL, flags | os.O_DIRECT)
        os.preadv(descriptor, [mmap(-1, BLOCK)], 0)
    except OSError:
        fcntl(descriptor, F_SETFL, flags)
        return False
    return True
