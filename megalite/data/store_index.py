"""The tables of a token store's `.idx`: lengths of sequences, where they begin, and where documents begin.

The file is little-endian and unpadded: 9 bytes magic · u64 version · u8 dtype code · u64 sequences S · u64 boundaries
D · i32[S] lengths in tokens · i64[S] byte offsets · i64[D] document boundaries, in sequences.
"""

import struct
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError, counted
from megalite.data.data_file import DataFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}

_CHUNK = 1 << 22  # entries verified at a time


class Table(Protocol):
    """Numbers of which some are read at a time: one, or an array by a slice."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: Any, /) -> Any: ...


@dataclass(frozen=True)
class StoreIndex:
    """The tables of one `.idx`."""

    file: DataFile
    dtype: np.dtype  # type of a token
    lengths: Table  # tokens in each sequence
    offsets: Table  # bytes into the .bin at which each sequence begins
    boundaries: Table  # sequences with which documents begin, and their number

    @staticmethod
    def read(file: DataFile) -> "StoreIndex":
        """The index in a file, of which the header and the ends of the tables are checked. Raises InputError."""
        dtype, sequences, boundaries = _header(file)
        ends = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * boundaries]).tolist()
        (tables,) = file.read([(0, ends[-1])])
        lengths, offsets, bounds = (
            tables[start:end].view(kind)  # not aligned to its numbers
            for start, end, kind in zip(ends, ends[1:], ("<i4", "<i8", "<i8"), strict=False)
        )
        found = StoreIndex(file, dtype, lengths, offsets, bounds)
        first, last = int(bounds[0]), int(bounds[-1])
        if (first, last) != (0, sequences):
            raise found.broken(f"document boundaries {first} to {last}", f"0 to {sequences}")
        if sequences and offsets[0] != 0:
            raise found.broken(f"first offset {offsets[0]}", "0")
        return found

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def documents(self) -> int:
        return len(self.boundaries) - 1

    @property
    def end(self) -> int:
        """The number of bytes that the `.bin` has."""
        return int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if self.sequences else 0

    def bounds(self, index: int) -> tuple[int, int]:
        """The numbers of a document's first token and of the one after its last. Raises InputError."""
        first, last = (int(self.boundaries[at]) for at in (index, index + 1))
        if not 0 <= first <= last <= self.sequences:
            raise self.broken(f"document {index} from sequence {first} to {last}", "boundaries that ascend")
        start, end = self._token_of_sequence(first), self._token_of_sequence(last)
        if not 0 <= start <= end <= self.end // self.dtype.itemsize:
            raise self.broken(f"document {index} from token {start} to {end}", "offsets that ascend")
        return start, end

    def begins(self, start: int, count: int) -> NDArray[np.int64]:
        """The positions in the `count` tokens from `start` at which documents begin, relative to `start` and without 0.

        Costs two binary searches. Raises InputError if the tables turn out to be out of order.
        """
        # No searchsorted: the tables are not aligned to their numbers, so it would copy them whole.
        size = self.dtype.itemsize
        low, high = (bisect_left(self.offsets, at * size) for at in (start + 1, start + max(1, count)))
        first, last = (bisect_left(self.boundaries, at) for at in (low, high))
        sequences = self.boundaries[first:last] - low
        offsets = self.offsets[low:high]
        if low <= high and first <= last and ((sequences >= 0) & (sequences < len(offsets))).all():
            found = offsets[sequences] // size - start
            if not len(found) or (found[0] > 0 and found[-1] < count and (np.diff(found) >= 0).all()):
                return np.unique(found)
        raise self.broken(f"tables out of order around token {start}", "offsets and boundaries that ascend")

    def document_lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """The number of tokens of each document from `first` to before `last`, in an index that was verified."""
        bounds = self.boundaries[first : last + 1]
        lengths = np.concatenate([[0], np.cumsum(self.lengths[int(bounds[0]) : int(bounds[-1])], dtype=np.int64)])
        return np.diff(lengths[bounds - bounds[0]])

    def verify(self) -> None:
        """Read everything. Raises InputError unless sequences lie back to back and boundaries ascend."""
        start = 0
        for at in range(0, self.sequences, _CHUNK):
            lengths = self.lengths[at : at + _CHUNK]
            offsets = self.offsets[at : at + _CHUNK]
            ends = start + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            expected = np.concatenate([[start], ends[:-1]])
            if (bad := _first_false(lengths >= 0)) is not None:
                raise self.broken(f"length {lengths[bad]} of sequence {at + bad}", "0 or more")
            if (bad := _first_false(offsets == expected)) is not None:
                raise self.broken(f"offset {offsets[bad]} of sequence {at + bad}", str(expected[bad]))
            start = int(ends[-1])
        for at in range(0, self.documents, _CHUNK):
            boundaries = self.boundaries[at : at + _CHUNK + 1]
            if (bad := _first_false(np.diff(boundaries) >= 0)) is not None:
                found = f"document {at + bad} from sequence {boundaries[bad]} to {boundaries[bad + 1]}"
                raise self.broken(found, "boundaries that ascend")

    def broken(self, found: str, expected: str) -> InputError:
        """The error for damage in the file."""
        return broken(self.file, found, expected)

    def _token_of_sequence(self, sequence: int) -> int:
        at = self.end if sequence == self.sequences else int(self.offsets[sequence])
        return at // self.dtype.itemsize


def render_header(dtype: np.dtype, sequences: int, boundaries: int) -> bytes:
    """The header of an index."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    return HEADER.pack(MAGIC, VERSION, code, sequences, boundaries)


def broken(file: DataFile, found: str, expected: str) -> InputError:
    """The error for damage in a file of a store."""
    return InputError(f"{file.name}: found {found}, expected {expected}; the store is damaged or incomplete")


def _header(file: DataFile) -> tuple[np.dtype, int, int]:
    if file.size < HEADER.size:
        raise broken(file, f"{file.size} bytes", f"a header of {HEADER.size}")
    (raw,) = file.read([(0, HEADER.size)])
    magic, version, code, sequences, boundaries = HEADER.unpack(raw.data)
    if magic != MAGIC:
        raise broken(file, f"magic {magic!r}", f"{MAGIC!r}: not a Megatron index")
    if version != VERSION:
        raise broken(file, f"version {version}", f"version {VERSION}")
    if code not in DTYPES:
        known = ", ".join(f"{key} {dtype.name}" for key, dtype in DTYPES.items())
        raise broken(file, f"dtype code {code}", f"an integer type ({known})")
    if boundaries < 1:
        raise broken(file, "0 document boundaries", "at least 1")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if file.size != expected:
        ends = counted(boundaries, "document boundary", "document boundaries")
        counts = f"{counted(sequences, 'sequence')} and {ends}"
        raise broken(file, f"{file.size} bytes", f"{expected} for {counts}")
    return DTYPES[code], sequences, boundaries


def _first_false(holds: NDArray[np.bool_]) -> int | None:
    return None if holds.all() else int(np.argmin(holds))
