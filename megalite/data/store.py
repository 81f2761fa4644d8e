"""Token stores: Megatron-Core's IndexedDataset, a `.bin` of raw tokens beside an `.idx`, see `store_index`.

megalite writes a `.json` with them, see `description`, and some have a `.mask`, see `mask`. A list of stores that are
read as one is in `joined_store`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.config.schema import Remote
from megalite.data.data_file import DataFile, fingerprint
from megalite.data.mask import Mask
from megalite.data.store_files import open_files
from megalite.data.store_index import StoreIndex, Table, broken

MAX_VOCABULARY = 1 << 31  # ids of a vocabulary: Megatron's largest type of a token is int32

_CHUNK = 1 << 22  # tokens verified at a time


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
        files = open_files(str(prefix), remote or Remote())
        self.description_prefix = files.description_prefix
        try:
            self._assemble(str(prefix), files.bin, StoreIndex.read(files.idx), files.mask)
        except OSError as error:
            raise InputError(f"{prefix}: cannot read the token store: {error}") from error

    def _assemble(self, prefix: str, tokens: DataFile, index: StoreIndex, mask: DataFile | None) -> None:
        """Make the store of its files, and check whether their sizes fit each other."""
        self.prefix, self.bin, self.index = prefix, tokens, index
        self.files = (tokens, index.file) if mask is None else (tokens, index.file, mask)  # as `fingerprint` has them
        self.dtype, self.sequences, self.documents = index.dtype, index.sequences, index.documents
        size, item = tokens.size, self.dtype.itemsize
        if size != index.end:
            raise broken(tokens, f"{size} bytes", f"{index.end} according to {Path(index.file.name).name}")
        if size % item:
            raise broken(tokens, f"{size} bytes", f"a multiple of {item} ({self.dtype.name})")
        self.tokens = size // item
        self.mask = None if mask is None else Mask(mask, self.tokens)

    @property
    def lengths(self) -> Table:
        """The number of tokens in each sequence."""
        return self.index.lengths

    @property
    def shards(self) -> "tuple[TokenStore, ...]":
        """The stores whose documents these are, one after the other."""
        return (self,)

    def trained(self, start: int, count: int) -> NDArray[np.bool_]:
        """The bits of the `count` tokens from `start`: whether each is trained."""
        return self.trained_from([start], count)[0]

    def trained_from(self, starts: Sequence[int], count: int) -> list[NDArray[np.bool_]]:
        """The bits of the `count` tokens from each start, all at once."""
        if self.mask is None:
            return [np.ones(count, np.bool_) for _ in starts]
        return self.mask.read([(start, start + count) for start in starts])

    def read(self, start: int, count: int) -> NDArray[np.integer]:
        """Tokens `start` to `start + count` of the concatenated stream; without a copy where the store is local."""
        return self.read_from([start], count)[0]

    def read_from(self, starts: Sequence[int], count: int) -> list[NDArray[np.integer]]:
        """The `count` tokens from each start, which a remote store asks for all at once."""
        for start in starts:
            if not 0 <= start <= start + count <= self.tokens:
                raise ValueError(f"{self.prefix}: tokens {start} to {start + count} of a store of {self.tokens}")
        size = self.dtype.itemsize
        found = self.bin.read([(start * size, (start + count) * size) for start in starts])
        return [each.view(self.dtype) for each in found]

    def document(self, index: int) -> NDArray[np.integer]:
        """All tokens of one document."""
        start, end = self.bounds(index)
        return self.read(start, end - start)

    def bounds(self, index: int) -> tuple[int, int]:
        """The numbers of a document's first token and of the one after its last."""
        if not 0 <= index < self.documents:
            raise ValueError(f"{self.prefix}: document {index} of a store of {self.documents}")
        return self.index.bounds(index)

    def begins(self, start: int, count: int) -> NDArray[np.int64]:
        """The positions at which documents begin, as `StoreIndex.begins` has them."""
        return self.index.begins(start, count)

    def fingerprint(self) -> str:
        """A text that identifies this store, wherever it lies."""
        return fingerprint(*self.files)

    def verify(self, vocab_size: int | None = None, advanced: Callable[[int], None] = lambda _: None) -> Scan:
        """Read everything; `advanced` is called with the number of tokens read.

        Raises InputError unless the index is in order, and every id is at least 0 and below `vocab_size`. Where that is
        None, ids must be small enough for some vocabulary.
        """
        self.index.verify()
        limit = vocab_size if vocab_size is not None else MAX_VOCABULARY
        largest = -1
        last_of_documents: set[int] = set()
        trained = 0
        for at in range(0, self.tokens, _CHUNK):
            ids = self.read(at, min(_CHUNK, self.tokens - at))
            largest = max(largest, int(ids.max()))
            if ids.min() < 0 or largest >= limit:
                bad = int(np.argmax((ids < 0) | (ids >= limit)))
                raise InputError(f"{self.bin.name}: token {at + bad} is {ids[bad]}, outside a vocabulary of {limit}")
            if len(last_of_documents) < 2:
                last_of_documents.update(np.unique(ids[self.begins(at, len(ids) + 1) - 1])[:2].tolist())
            trained += int(self.trained(at, len(ids)).sum())
            advanced(len(ids))
        if self.tokens:
            last_of_documents.add(int(self.read(self.tokens - 1, 1)[0]))
        end = last_of_documents.pop() if len(last_of_documents) == 1 else None
        return Scan(largest, end, None if self.mask is None else trained)
