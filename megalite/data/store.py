"""Token stores: Megatron-Core's IndexedDataset, a `.bin` of raw tokens beside an `.idx` of lengths.

megalite writes a `.json` with them, see `description`, and some have a `.mask`, see `mask`. The `.idx` is little-endian
and unpadded: 9 bytes magic · u64 version · u8 dtype code · u64 sequences S · u64 boundaries D · i32[S] lengths in
tokens · i64[S] byte offsets · i64[D] document boundaries, in sequences.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError, counted
from megalite.config.schema import Remote
from megalite.data.data_file import DataFile, fingerprint
from megalite.data.mask import Mask
from megalite.data.store_files import open_files

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
MAX_VOCABULARY = 1 << 31  # ids of a vocabulary: Megatron's largest type of a token is int32
DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}

_CHUNK = 1 << 22  # entries verified at a time


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron picks for a vocabulary: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


@dataclass(frozen=True)
class Scan:
    """The result of reading a whole store."""

    largest_id: int  # −1: there is no token
    end_of_document: int | None  # the last token of every document, if that is one and the same
    trained_tokens: int | None = None  # tokens that the mask says are trained; None: there is no mask


class TokenStore:
    """A store, read as one stream of tokens: memory-mapped where `prefix` is a path, by ranges where it is a URL.

    To open a store costs the same for any size: only the header and the ends of the tables are read; `verify` reads
    everything. A remote one has its `.idx` copied first. Raises InputError where files are missing or do not belong
    together.
    """

    def __init__(self, prefix: str | Path, remote: Remote | None = None) -> None:
        self.prefix = str(prefix)
        files = open_files(self.prefix, remote or Remote())
        self._bin, self._idx, self.files, self.description_prefix = (
            files.bin,
            files.idx,
            files.all,
            files.description_prefix,
        )
        try:
            self._open(files.mask)
        except OSError as error:
            raise InputError(f"{self.prefix}: cannot read the token store: {error}") from error

    def trained(self, start: int, count: int) -> NDArray[np.bool_]:
        """The bits of the `count` tokens from `start`: whether each is trained."""
        return self.trained_from([start], count)[0]

    def trained_from(self, starts: Sequence[int], count: int) -> list[NDArray[np.bool_]]:
        """The bits of the `count` tokens from each start, all at once."""
        return [np.ones(count, np.bool_) for _ in starts] if self.mask is None else self.mask.read(starts, count)

    def read(self, start: int, count: int) -> NDArray[np.integer]:
        """Tokens `start` to `start + count` of the concatenated stream; without a copy where the store is local."""
        return self.read_from([start], count)[0]

    def read_from(self, starts: Sequence[int], count: int) -> list[NDArray[np.integer]]:
        """The `count` tokens from each start, which a remote store asks for all at once."""
        for start in starts:
            if not 0 <= start <= start + count <= self.tokens:
                raise ValueError(f"{self.prefix}: tokens {start} to {start + count} of a store of {self.tokens}")
        size = self.dtype.itemsize
        found = self._bin.read([(start * size, (start + count) * size) for start in starts])
        return [each.view(self.dtype) for each in found]

    def document(self, index: int) -> NDArray[np.integer]:
        """All tokens of one document."""
        start, end = self.bounds(index)
        return self.read(start, end - start)

    def bounds(self, index: int) -> tuple[int, int]:
        """The numbers of a document's first token and of the one after its last."""
        if not 0 <= index < self.documents:
            raise ValueError(f"{self.prefix}: document {index} of a store of {self.documents}")
        first, last = (int(self._boundaries[at]) for at in (index, index + 1))
        if not 0 <= first <= last <= self.sequences:
            raise self._broken(self._idx, f"document {index} from sequence {first} to {last}", "boundaries that ascend")
        start, end = self._token_of_sequence(first), self._token_of_sequence(last)
        if not 0 <= start <= end <= self.tokens:
            raise self._broken(self._idx, f"document {index} from token {start} to {end}", "offsets that ascend")
        return start, end

    def begins(self, start: int, count: int) -> NDArray[np.int64]:
        """The positions in the `count` tokens from `start` at which documents begin, relative to `start` and without 0.

        Costs two binary searches. Raises InputError if the tables turn out to be out of order.
        """
        # No searchsorted: the tables are not aligned to their numbers, so it would copy them whole.
        size = self.dtype.itemsize
        low, high = (bisect_left(self._offsets, at * size) for at in (start + 1, start + max(1, count)))
        first, last = (bisect_left(self._boundaries, at) for at in (low, high))
        sequences = self._boundaries[first:last] - low
        offsets = self._offsets[low:high]
        if low <= high and first <= last and ((sequences >= 0) & (sequences < len(offsets))).all():
            found = offsets[sequences] // size - start
            if not len(found) or (found[0] > 0 and found[-1] < count and (np.diff(found) >= 0).all()):
                return np.unique(found)
        raise self._broken(self._idx, f"tables out of order around token {start}", "offsets and boundaries that ascend")

    def fingerprint(self) -> str:
        """A text that identifies this store, wherever it lies."""
        return fingerprint(*self.files)

    def verify(self, vocab_size: int | None = None, advanced: Callable[[int], None] = lambda _: None) -> Scan:
        """Read everything; `advanced` is called with the number of tokens read.

        Raises InputError unless sequences lie back to back, boundaries ascend, and every id is at least 0 and below
        `vocab_size`. Where that is None, ids must be small enough for some vocabulary.
        """
        self._verify_sequences()
        self._verify_boundaries()
        return self._verify_ids(vocab_size, advanced)

    def _open(self, mask: DataFile | None) -> None:
        self.dtype, self.sequences, boundaries = self._header()
        self.documents = boundaries - 1
        lengths_end = HEADER.size + 4 * self.sequences
        offsets_end = lengths_end + 8 * self.sequences
        self.lengths = self._table("<i4", HEADER.size, self.sequences)  # tokens in each sequence
        self._offsets = self._table("<i8", lengths_end, self.sequences)  # bytes into the .bin
        self._boundaries = self._table("<i8", offsets_end, boundaries)
        self.tokens = self._bin.size // self.dtype.itemsize
        self._check_ends()
        self.mask = None if mask is None else Mask(mask, self.tokens)

    def _verify_sequences(self) -> None:
        start = 0
        for at in range(0, self.sequences, _CHUNK):
            lengths = self.lengths[at : at + _CHUNK]
            offsets = self._offsets[at : at + _CHUNK]
            ends = start + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            expected = np.concatenate([[start], ends[:-1]])
            if (bad := _first_false(lengths >= 0)) is not None:
                raise self._broken(self._idx, f"length {lengths[bad]} of sequence {at + bad}", "0 or more")
            if (bad := _first_false(offsets == expected)) is not None:
                raise self._broken(self._idx, f"offset {offsets[bad]} of sequence {at + bad}", str(expected[bad]))
            start = int(ends[-1])

    def _verify_boundaries(self) -> None:
        for at in range(0, self.documents, _CHUNK):
            boundaries = self._boundaries[at : at + _CHUNK + 1]
            if (bad := _first_false(np.diff(boundaries) >= 0)) is not None:
                found = f"document {at + bad} from sequence {boundaries[bad]} to {boundaries[bad + 1]}"
                raise self._broken(self._idx, found, "boundaries that ascend")

    def _verify_ids(self, vocab_size: int | None, advanced: Callable[[int], None]) -> Scan:
        limit = vocab_size if vocab_size is not None else MAX_VOCABULARY
        largest = -1
        last_of_documents: set[int] = set()
        trained = 0
        for at in range(0, self.tokens, _CHUNK):
            ids = self.read(at, min(_CHUNK, self.tokens - at))
            largest = max(largest, int(ids.max()))
            if ids.min() < 0 or largest >= limit:
                bad = int(np.argmax((ids < 0) | (ids >= limit)))
                raise InputError(f"{self._bin.name}: token {at + bad} is {ids[bad]}, outside a vocabulary of {limit}")
            if len(last_of_documents) < 2:
                last_of_documents.update(np.unique(ids[self.begins(at, len(ids) + 1) - 1])[:2].tolist())
            trained += int(self.trained(at, len(ids)).sum())
            advanced(len(ids))
        if self.tokens:
            last_of_documents.add(int(self.read(self.tokens - 1, 1)[0]))
        end = last_of_documents.pop() if len(last_of_documents) == 1 else None
        return Scan(largest, end, None if self.mask is None else trained)

    def _header(self) -> tuple[np.dtype, int, int]:
        with self._idx.path.open("rb") as file:
            raw = file.read(HEADER.size)
        if len(raw) < HEADER.size:
            raise self._broken(self._idx, f"{len(raw)} bytes", f"a header of {HEADER.size}")
        magic, version, code, sequences, boundaries = HEADER.unpack(raw)
        if magic != MAGIC:
            raise self._broken(self._idx, f"magic {magic!r}", f"{MAGIC!r}: not a Megatron index")
        if version != VERSION:
            raise self._broken(self._idx, f"version {version}", f"version {VERSION}")
        if code not in DTYPES:
            known = ", ".join(f"{key} {dtype.name}" for key, dtype in DTYPES.items())
            raise self._broken(self._idx, f"dtype code {code}", f"an integer type ({known})")
        if boundaries < 1:
            raise self._broken(self._idx, "0 document boundaries", "at least 1")
        size, expected = self._idx.size, HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            ends = counted(boundaries, "document boundary", "document boundaries")
            counts = f"{counted(sequences, 'sequence')} and {ends}"
            raise self._broken(self._idx, f"{size} bytes", f"{expected} for {counts}")
        return DTYPES[code], sequences, boundaries

    def _check_ends(self) -> None:
        """Check what is cheap: whether both ends of every table agree with each other and with the `.bin`."""
        first, last = int(self._boundaries[0]), int(self._boundaries[-1])
        if (first, last) != (0, self.sequences):
            raise self._broken(self._idx, f"document boundaries {first} to {last}", f"0 to {self.sequences}")
        if self.sequences and self._offsets[0] != 0:
            raise self._broken(self._idx, f"first offset {self._offsets[0]}", "0")
        end = int(self._offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if self.sequences else 0
        size = self._bin.size
        if size != end:
            raise self._broken(self._bin, f"{size} bytes", f"{end} according to {Path(self._idx.name).name}")
        if size % self.dtype.itemsize:
            raise self._broken(self._bin, f"{size} bytes", f"a multiple of {self.dtype.itemsize} ({self.dtype.name})")

    def _table(self, dtype: str, offset: int, count: int) -> NDArray[np.integer]:
        return np.memmap(self._idx.path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)

    def _token_of_sequence(self, sequence: int) -> int:
        if sequence == self.sequences:
            return self.tokens
        return int(self._offsets[sequence]) // self.dtype.itemsize

    @staticmethod
    def _broken(file: DataFile, found: str, expected: str) -> InputError:
        return InputError(f"{file.name}: found {found}, expected {expected}; the store is damaged or incomplete")


def _first_false(holds: NDArray[np.bool_]) -> int | None:
    return None if holds.all() else int(np.argmin(holds))
