"""A cache of blocks in one local file of bounded size, which any number of processes share without locks.

The file has `WAYS` entries for every set, and after all entries the blocks in the same order. An entry is the block's
key and a hash of key and block, checked at every read: a block that was half written, by a process that was killed or
by two at once, or that the disk has lost, counts as absent. Pages of a file that was never written to take no disk.
"""

import mmap
import os
from functools import cache
from pathlib import Path

import xxhash

from megalite.base.errors import InputError
from megalite.base.output import warn
from megalite_launch.base.files import PRIVATE_MODE, opened

BLOCK_BYTES = 1 << 14  # about a sample: a hash is made of a whole block, however little of it is wanted
WAYS = 8  # places where a block can be
KEY_BYTES = 16
ENTRY_BYTES = 2 * KEY_BYTES


class BlockCache:
    """The cache of at most `size` bytes in a folder.

    Raises InputError if there is one of another size, or none can be made.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / "blocks"
        self._sets = max(1, size // (WAYS * (ENTRY_BYTES + BLOCK_BYTES)))
        self._warned = False
        total = self._sets * WAYS * (ENTRY_BYTES + BLOCK_BYTES)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = opened(self.path, os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
            if os.fstat(self._file).st_size == 0:
                os.ftruncate(self._file, total)
                # So that no full disk can fail a look at them, which are mapped to memory.
                os.posix_fallocate(self._file, 0, self._sets * WAYS * ENTRY_BYTES)
            found = os.fstat(self._file).st_size
        except OSError as error:
            raise InputError(
                f"{self.path}: the cache of remote data cannot be opened: {error.strerror}; "
                "name another folder in data.remote.cache"
            ) from error
        if found != total:
            os.close(self._file)
            raise InputError(
                f"{self.path}: is a cache of {found / 2**30:.6g} GiB, not of data.remote.cache_size, "
                f"{total / 2**30:.6g} GiB; use that size, name another folder in data.remote.cache, "
                "or remove the file while no run reads it"
            )
        self._mapped = mmap.mmap(self._file, total, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._mapped)  # a slice of it is no copy

    def read(self, key: int, into: memoryview) -> bool:
        """Fill `into` with the block `key` if it is there; return whether it is."""
        first = self._first(key) * ENTRY_BYTES
        at = self._mapped.find(key.to_bytes(KEY_BYTES, "little"), first, first + WAYS * ENTRY_BYTES)
        if at < 0 or at % ENTRY_BYTES:
            return False
        check = self._mapped[at + KEY_BYTES : at + ENTRY_BYTES]
        place = self._place(at // ENTRY_BYTES)
        into[:] = self._bytes[place : place + len(into)]  # copied first: another process may write there
        return _hash(key, into) == check

    def write(self, key: int, block: memoryview) -> None:
        """Keep a block, in place of another if need be. Warns once if the disk does not take it."""
        name = key.to_bytes(KEY_BYTES, "little")
        check = _hash(key, block)
        try:
            first = self._first(key)
            places = range(first * ENTRY_BYTES, (first + WAYS) * ENTRY_BYTES, ENTRY_BYTES)
            names = [self._mapped[at : at + KEY_BYTES] for at in places]
            free = next((names.index(each) for each in (name, bytes(KEY_BYTES)) if each in names), None)
            slot = first + (check[0] % WAYS if free is None else free)
            if os.pwrite(self._file, block, self._place(slot)) == len(block):
                os.pwrite(self._file, name + check, slot * ENTRY_BYTES)
        except OSError as error:
            self._warn(error)

    def _first(self, key: int) -> int:
        """The number of the first entry of a block's set. Successive keys are in successive sets."""
        return key % self._sets * WAYS

    def _place(self, slot: int) -> int:
        return self._sets * WAYS * ENTRY_BYTES + slot * BLOCK_BYTES

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warn(f"{self.path}: {error.strerror}; remote data is read again from its server where the cache lacks it")


@cache
def open_cache(folder: Path, size: int) -> BlockCache:
    """The process's cache in a folder, as `BlockCache` opens it."""
    return BlockCache(folder, size)


def _hash(key: int, block: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(block, seed=key % 2**64)
