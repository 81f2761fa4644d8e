"""Finds documents that are exact copies of earlier ones, by hashes of their tokens or of their normalized text.

Hashes are spread over buckets, so many that one fits in memory at a time; with one bucket nothing goes to the disk.
"""

import math
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.data.joined_store import JoinedStore
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite_tools.data.joining import open_joined

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])  # a hash of 128 bits that nobody can forge
RECORD = np.dtype([("key", KEY), ("document", "<u8")])
BYTES_PER_DOCUMENT = 4 * RECORD.itemsize  # memory while a bucket is sorted
MAX_BUCKETS = 512  # files open at a time


@dataclass(frozen=True)
class Hashing:
    """The stores whose documents are hashed, and how."""

    inputs: tuple[str, ...]
    tokenizer: str | None = None  # path; None: tokens are hashed, not text


def normalized(text: str) -> str:
    """The text without what does not count: compatible forms of characters, case, and the kind and number of blanks."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def hash_documents(hashing: Hashing, span: tuple[int, int]) -> NDArray:
    """The keys of the documents from the first to before the last of `span`."""
    store, tokenizer = _opened(hashing)
    keys = bytearray()
    for document in range(*span):
        tokens = store.document(document)
        content = tokens.tobytes() if tokenizer is None else _text(tokens.tolist(), tokenizer)
        keys += blake2b(content, digest_size=KEY.itemsize).digest()
    return np.frombuffer(bytes(keys), KEY)


class DuplicateFinder:
    """Tells which of `documents` documents have the key of an earlier one.

    memory: bytes for records; those of more documents wait in files in `folder` that have no name, so that they go with
    the process however it ends. Raises InputError where the disk refuses, or if memory is too small.
    """

    def __init__(self, documents: int, memory: float, folder: Path) -> None:
        self._count, self._folder = documents, folder
        self._buckets = max(1, math.ceil(documents * BYTES_PER_DOCUMENT / memory))
        if self._buckets > MAX_BUCKETS:
            least = documents * BYTES_PER_DOCUMENT / MAX_BUCKETS / 2**30
            raise InputError(f"--memory {memory / 2**30:g}: {documents:,} documents need at least {least:.3g} GiB")

    def find(self, keys: Iterator[NDArray]) -> NDArray[np.bool_]:
        """Mark the documents that are copies, given the keys of all, in parts."""
        try:
            with ExitStack() as stack:
                files = [
                    stack.enter_context(tempfile.TemporaryFile(dir=self._folder))
                    for _ in range(self._buckets if self._buckets > 1 else 0)
                ]
                kept = self._spread(keys, files)
                copies = np.zeros(self._count, np.bool_)
                for records in [kept] if not files else map(_records, files):
                    copies[_copies(records)] = True
                return copies
        except OSError as error:
            raise InputError(f"{self._folder}: cannot write hashes of documents: {error.strerror}") from error

    def _spread(self, keys: Iterator[NDArray], files: Sequence[BinaryIO]) -> NDArray:
        """Write the records of all documents into the files of their buckets; without files, return them."""
        kept = np.empty(0 if files else self._count, RECORD)
        first = 0
        for part in keys:
            records = np.empty(len(part), RECORD)
            records["key"], records["document"] = part, np.arange(first, first + len(part))
            if files:
                bucket = records["key"]["high"] % len(files)
                records = records[np.argsort(bucket, kind="stable")]
                ends = np.cumsum(np.bincount(bucket.astype(np.int64), minlength=len(files)))
                for file, its in zip(files, np.split(records, ends[:-1]), strict=True):
                    file.write(its.tobytes())
            else:
                kept[first : first + len(part)] = records
            first += len(part)
        return kept


def _records(file: BinaryIO) -> NDArray:
    file.seek(0)
    return np.frombuffer(file.read(), RECORD)


def _copies(records: NDArray) -> NDArray[np.uint64]:
    """The documents with the key of an earlier one; records are in the order of documents."""
    order = np.lexsort((records["key"]["low"], records["key"]["high"]))  # stable: the first of equal keys stays first
    keys = records["key"][order]
    return records["document"][order][1:][keys[1:] == keys[:-1]]


@cache
def _opened(hashing: Hashing) -> tuple[JoinedStore, Tokenizer | None]:
    return open_joined(hashing.inputs), None if hashing.tokenizer is None else load_tokenizer(hashing.tokenizer)


def _text(ids: list[int], tokenizer: Tokenizer) -> bytes:
    """The normalized text of a document without the special tokens that end it."""
    while ids and 0 <= ids[-1] < tokenizer.vocab_size and tokenizer.is_special(ids[-1]):
        del ids[-1]
    return normalized(tokenizer.decode(ids)).encode(errors="surrogatepass")
