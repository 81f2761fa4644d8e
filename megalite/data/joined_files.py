"""Files of several token stores, read as if they were one file each, with nothing copied.

Every byte is that of the store which has the documents of all, one after the other, so its fingerprint is the same too.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.data_file import Bytes, DataFile, LocalFile, Range
from megalite.data.mask import Mask
from megalite.data.store_index import StoreIndex, Table, render_header

MAX_THREADS = 16  # threads that ask servers for parts of different files at the same time


class JoinedParts:
    """Parts end to end, of `sizes` items. `read` is called with the number of a part and the ranges wanted of it."""

    def __init__(
        self, sizes: Sequence[int], read: Callable[[int, Sequence[Range]], Sequence[NDArray]], at_once: bool
    ) -> None:
        self._bounds = [0, *accumulate(sizes)]
        self._read, self._at_once = read, at_once

    @property
    def size(self) -> int:
        return self._bounds[-1]

    def read(self, ranges: Sequence[Range]) -> list[NDArray]:
        """The items in each range. One that lies in a single part is not copied."""
        wanted: dict[int, list[tuple[int, Range]]] = {}
        for number, (start, stop) in enumerate(ranges):
            part = min(bisect_right(self._bounds, start), len(self._bounds) - 1) - 1
            while True:
                base, end = self._bounds[part], min(stop, self._bounds[part + 1])
                if start < end or start == stop:  # nothing is asked of empty parts
                    wanted.setdefault(part, []).append((number, (start - base, end - base)))
                if end == stop:
                    break
                start, part = end, part + 1
        parts = sorted(wanted)
        read = self._threads.map if self._at_once and len(parts) > 1 else map
        found: list[list[NDArray]] = [[] for _ in ranges]
        for part, pieces in zip(
            parts, read(lambda at: self._read(at, [of for _, of in wanted[at]]), parts), strict=True
        ):
            for (number, _), piece in zip(wanted[part], pieces, strict=True):
                found[number].append(piece)
        return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in found]

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MAX_THREADS, "shards")


class JoinedFile:
    """Files end to end, as one."""

    def __init__(self, name: str, files: Sequence[DataFile]) -> None:
        self.name, self.version = name, _version(files)
        self._parts = JoinedParts([file.size for file in files], lambda at, of: files[at].read(of), _at_once(files))
        self.size = self._parts.size

    def read(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes in each range."""
        return self._parts.read(ranges)


class JoinedMaskFile:
    """The masks of several stores, whose bits follow each other, as one file."""

    def __init__(self, name: str, masks: Sequence[Mask]) -> None:
        files = [mask.file for mask in masks]
        self.name, self.version = name, _version(files)
        self._bits = JoinedParts([mask.tokens for mask in masks], lambda at, of: masks[at].read(of), _at_once(files))
        self.size = -(-self._bits.size // 8)

    def read(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes in each range."""
        tokens = [(min(8 * start, self._bits.size), min(8 * stop, self._bits.size)) for start, stop in ranges]
        return [np.packbits(bits, bitorder="little") for bits in self._bits.read(tokens)]


class JoinedTable:
    """Tables end to end, as one, with a number added to all entries of each."""

    def __init__(self, tables: Sequence[Table], added: Sequence[int]) -> None:
        self._tables, self._added = tables, added
        self._bounds = [0, *accumulate(map(len, tables))]

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, at: int | slice, /) -> Any:
        """One entry, or those of a slice whose step is positive."""
        if isinstance(at, slice):
            return np.concatenate(list(self._pieces(range(*at.indices(len(self))))) or [self._tables[0][:0]])
        at = range(len(self))[at]
        part = bisect_right(self._bounds, at) - 1
        return int(self._tables[part][at - self._bounds[part]]) + self._added[part]

    def _pieces(self, wanted: range) -> Iterator[NDArray[np.integer]]:
        part = bisect_right(self._bounds, wanted.start) - 1
        while wanted:
            base, end = self._bounds[part], min(wanted.stop, self._bounds[part + 1])
            if count := len(range(wanted.start, end, wanted.step)):
                yield self._tables[part][wanted.start - base : end - base : wanted.step] + self._added[part]
            wanted, part = wanted[count:], part + 1


class JoinedIndexFile:
    """The `.idx` that has these tables."""

    def __init__(self, name: str, files: Sequence[DataFile], header: bytes, tables: Sequence[Table]) -> None:
        self.name, self.version = name, _version(files)
        self._parts: list[tuple[int, int, Table]] = []  # first byte, bytes of an entry, entries
        self.size = 0
        for item, table in ((1, np.frombuffer(header, "u1")), *zip((4, 8, 8), tables, strict=True)):
            self._parts.append((self.size, item, table))
            self.size += item * len(table)

    def read(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes in each range."""
        return [np.concatenate([self._within(start, stop, *part) for part in self._parts]) for start, stop in ranges]

    @staticmethod
    def _within(start: int, stop: int, base: int, item: int, table: Table) -> Bytes:
        """The bytes from `start` to before `stop` that the table has, which begins at `base`."""
        start, stop = max(0, start - base), max(0, min(stop - base, item * len(table)))
        entries = np.ascontiguousarray(table[start // item : -(-stop // item)]).view("u1")
        return entries[start % item :][: max(0, stop - start)]


@dataclass(frozen=True)
class JoinedIndex(StoreIndex):
    """The index of the documents of all parts, one after the other."""

    parts: Sequence[StoreIndex]
    starts: Sequence[int]  # tokens before each part, and in all of them

    def begins(self, start: int, count: int) -> NDArray[np.int64]:
        """The positions at which documents begin, as `StoreIndex.begins` has them: each part is searched by itself."""
        found, end = [], start + max(1, count)
        for at in range(bisect_right(self.starts, start, hi=len(self.parts)) - 1, len(self.parts)):
            base, first = self.starts[at], max(self.starts[at], start)
            if first >= end:
                break
            if base > start:
                found.append(np.array([base - start]))
            found.append(self.parts[at].begins(first - base, end - first) + (first - start))
        return found[0] if len(found) == 1 else np.unique(np.concatenate(found))  # an empty end is a begin too


def join_indices(name: str, indices: Sequence[StoreIndex]) -> StoreIndex:
    """The index of the documents of all, one after the other; they have one dtype."""
    dtype = indices[0].dtype
    lengths = JoinedTable([index.lengths for index in indices], [0] * len(indices))
    offsets = JoinedTable([index.offsets for index in indices], _before(index.end for index in indices))
    ends = [index.boundaries if at == 0 else index.boundaries[1:] for at, index in enumerate(indices)]
    boundaries = JoinedTable(ends, _before(index.sequences for index in indices))
    header = render_header(dtype, len(lengths), len(boundaries))
    files = [index.file for index in indices]
    file = JoinedIndexFile(name, files, header, (lengths, offsets, boundaries))
    starts = [0, *accumulate(index.end // dtype.itemsize for index in indices)]
    return JoinedIndex(file, dtype, lengths, offsets, boundaries, indices, starts)


def _before(sizes: Iterable[int]) -> list[int]:
    """The sum of the sizes before each part."""
    return [0, *accumulate(sizes)][:-1]


def _version(files: Sequence[DataFile]) -> str:
    return hashlib.sha256("\n".join(str(file.version) for file in files).encode()).hexdigest()


def _at_once(files: Sequence[DataFile]) -> bool:
    """Return whether to read several files at the same time: those on servers."""
    return not all(isinstance(file, LocalFile) for file in files)
