"""Bytes of a file of a token store, wherever it lies: here on this machine, in `remote` on a server."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Range = tuple[int, int]  # first byte, and the one after the last

_PAGES, _PAGE = 32, 4096  # pages of each file that make up a fingerprint; bytes of a page


class DataFile(Protocol):
    """A file that does not change while it is read."""

    @property
    def name(self) -> str:
        """The path or URL."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def version(self) -> str | int:
        """A value that changes with the content."""

    def read(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes in each range. Raises InputError if they cannot be had."""


class LocalFile:
    """A memory-mapped file. Raises OSError."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or str(path)
        status = path.stat()
        self.size, self.version = status.st_size, status.st_mtime_ns
        self._bytes = np.asarray(np.memmap(path, "u1", "r")) if self.size else np.empty(0, "u1")

    def read(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes in each range, without a copy."""
        return [self._bytes[start:stop] for start, stop in ranges]


def fingerprint(*files: DataFile) -> str:
    """A hash that identifies files, wherever they lie: of their sizes, and of pages spread over them."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.size.to_bytes(8, "little"))
        starts = [max(0, file.size - _PAGE) * page // (_PAGES - 1) for page in range(_PAGES)]
        for found in file.read([(start, min(start + _PAGE, file.size)) for start in starts]):
            digest.update(found.data)
    return digest.hexdigest()
