"""The hashes of a store's blocks, in its `PREFIX.hashes`: what a server sends is compared with them.

After a magic of 16 bytes, xxh3-128 of every block of `.bin`, of `.idx` and, where there is one, of `.mask`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.base.files import write_whole
from megalite.data.block_cache import BLOCK_BYTES
from megalite.data.data_file import DataFile

MAGIC = b"megalite hashes\x01"


def hashes_file(prefix: str | Path) -> Path:
    """The path of a store's hashes."""
    return Path(f"{prefix}.hashes")


def write_hashes(prefix: str, files: Sequence[DataFile], advanced: Callable[[int], None] = lambda _: None) -> None:
    """Write the hashes of a store with these files; `advanced` is called with the number of bytes read."""
    digests = [MAGIC]
    for file in files:
        for start in range(0, file.size, BLOCK_BYTES):
            (block,) = file.read([(start, min(start + BLOCK_BYTES, file.size))])
            digests.append(xxhash.xxh3_128_digest(block.data))
            advanced(len(block))
    write_whole(hashes_file(prefix), b"".join(digests))


def blocks_in(size: int) -> int:
    """The number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


def split_hashes(name: str, content: NDArray[np.uint8], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The hashes `[blocks, 16]` of each file, by their sizes. Raises InputError unless they are of such files."""
    counts = [blocks_in(size) for size in sizes]
    expected = len(MAGIC) * (1 + sum(counts))
    if len(content) != expected or content[: len(MAGIC)].tobytes() != MAGIC:
        rule = f"are not the hashes of this store: {len(content):,} bytes, expected {expected:,}"
        raise InputError(f"{name}: {rule}; write it anew with megalite-inspect-data --hashes and copy all files again")
    return np.split(content.reshape(-1, len(MAGIC))[1:], np.cumsum(counts)[:-1])
