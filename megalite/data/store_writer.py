"""Writes token stores, in the form that `store` reads: under their names only when all of them is on the disk."""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megalite.base.errors import InputError
from megalite.base.files import exists
from megalite.data.data_file import LocalFile, fingerprint
from megalite.data.description import MAX_SOURCES, Description, SourceFile, TokenizerFile, description_file
from megalite.data.exclusive_file import claim
from megalite.data.mask import MaskBits, mask_file
from megalite.data.shards import shards_file
from megalite.data.store import TokenStore, token_dtype
from megalite.data.store_files import store_files
from megalite.data.store_index import render_header

COPIED_DOCUMENTS, COPIED_TOKENS = 1 << 20, 1 << 22  # at a time


class StoreWriter:
    """Writes a store document by document; it appears under its name only when complete.

    It is a context manager: leaving it normally publishes the store, leaving it by an exception removes every trace. A
    killed process leaves hidden files, which the next process that writes the same store takes over. Raises InputError
    if the store exists, if another process is writing it, and if the file system refuses, for example on a full disk.
    Memory: 4 bytes per document.

    The origin of the tokens goes into the store's description, as far as it is given. `end_of_document` is the id with
    which every given document ends. masked: the store has a mask, whose bits are given with the tokens. packed: tokens
    of the sequences that whole documents fill. temporary: once sealed it can be read, under the prefix `hidden_prefix`;
    it is never published. unlisted_sources: further files than `sources` that tokens are of. replace: take the place of
    a store of that name, which stays until the new one is complete.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        end_of_document: int | None = None,
        tokenizer: TokenizerFile | None = None,
        sources: Iterable[SourceFile] = (),
        masked: bool = False,
        packed: int | None = None,
        temporary: bool = False,
        unlisted_sources: int = 0,
        replace: bool = False,
    ) -> None:
        self.prefix = Path(prefix)
        self.tokens = 0
        self.largest_id = -1
        self.end_of_document, self._tokenizer, self._sources = end_of_document, tokenizer, tuple(sources)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")
        self._open = 0  # tokens of the document that has not ended
        if self.prefix.name in ("", ".."):
            raise InputError(f"{prefix}: not a name for a token store; PREFIX.bin and PREFIX.idx will be written")
        self._mask = MaskBits() if masked else None
        self._bits: BinaryIO | None = None  # where the mask is written
        self._packed, self._temporary, self._unlisted_sources = packed, temporary, unlisted_sources
        self.hidden_prefix = partial = self.prefix.with_name(f".{self.prefix.name}.partial")
        self._final, self.hidden = (  # hidden: where it is until it is complete
            (*store_files(prefix), description_file(prefix), mask_file(prefix)) for prefix in (self.prefix, partial)
        )
        self._sealed, self._replace = False, replace

    @property
    def documents(self) -> int:
        return len(self._lengths)

    @property
    def trained(self) -> int | None:
        """The number of trained tokens; None: the store has no mask."""
        return None if self._mask is None else self._mask.trained

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths of the `.bin`, the `.idx`, the `.json` and a mask once they are published."""
        return self._final if self._mask is not None else self._final[:3]

    def __enter__(self) -> Self:
        with self._explained():
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._tokens = claim(self.hidden[0], str(self.prefix))
        for path in () if self._replace else (*self._final, shards_file(self.prefix)):
            if os.path.lexists(path):
                self._discard()
                raise InputError(f"{path}: exists already; remove it or choose another name")
        if self._mask is not None:
            try:
                with self._explained():
                    self.hidden[3].unlink(missing_ok=True)
                    self._bits = self.hidden[3].open("xb")
            except InputError:
                self._discard()
                raise
        return self

    def add(self, document: ArrayLike, trained: ArrayLike | None = None) -> None:
        """Append one document: a one-dimensional array of token ids that fit the store's dtype. trained: see extend."""
        self.extend(document, trained)
        self.end_document()

    def extend(self, tokens: ArrayLike, trained: ArrayLike | None = None) -> None:
        """Append tokens to the document that is open. trained: whether each is, given where the store has a mask."""
        tokens = np.asarray(tokens)
        if (trained is None) != (self._mask is None):
            raise ValueError(f"{self.prefix}: a mask goes with the tokens of a store that has one, and with no others")
        self._append(tokens, trained)
        self._open += tokens.size

    def copy(self, store: TokenStore, first: int, last: int, advanced: Callable[[int], None] = lambda _: None) -> None:
        """Append the documents from `first` to before `last` of a store of the same kind, each as one sequence.

        The store's index has been verified. advanced: called with the number of tokens written. Raises InputError for a
        token below 0, and for a document with more tokens than the format can count.
        """
        for at in range(first, last, COPIED_DOCUMENTS):
            end = min(at + COPIED_DOCUMENTS, last)
            lengths = store.index.document_lengths(at, end)
            begin, stop = store.bounds(at)[0], store.bounds(end - 1)[1]
            for start in range(begin, stop, COPIED_TOKENS):
                count = min(COPIED_TOKENS, stop - start)
                tokens = store.read(start, count)
                if tokens.min() < 0:
                    raise InputError(f"{store.bin.name}: holds the token id {tokens.min()}; is it a store of tokens?")
                self._append(tokens, None if self._mask is None else store.trained(start, count))
                advanced(count)
            for each in lengths.tolist():
                self._open = each
                self.end_document()

    def _append(self, tokens: NDArray[np.integer], trained: ArrayLike | None) -> None:
        limits = np.iinfo(self._dtype)
        if tokens.size:
            if tokens.min() < 0 or tokens.max() > limits.max:
                raise ValueError(f"token ids {tokens.min()} to {tokens.max()} in a store of {self._dtype.name}")
            self.largest_id = max(self.largest_id, int(tokens.max()))
        with self._explained():
            self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
            if self._mask is not None and self._bits is not None:
                bits = np.asarray(trained, np.bool_)
                if bits.shape != tokens.shape:
                    raise ValueError(f"{self.prefix}: a mask of {bits.shape} for tokens of {tokens.shape}")
                self._bits.write(self._mask.add(bits))
        self.tokens += tokens.size

    def end_document(self) -> None:
        """Complete the open document. Raises InputError if it has more tokens than the format can count."""
        if self._open >= 1 << 31:
            raise InputError(
                f"{self.prefix}: document {self.documents} has {self._open:,} tokens; at most 2**31 − 1 fit; split it"
            )
        self._lengths.append(self._open)
        self._open = 0

    def seal(self) -> None:
        """Put everything on disk without publishing it, so that several stores can be published at once."""
        lengths = np.array(self._lengths, "<i4")
        offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * self._dtype.itemsize
        with self._explained():
            self._tokens.flush()
            os.fsync(self._tokens.fileno())
            if self._mask is not None and self._bits is not None:
                self._bits.write(self._mask.end())
                self._bits.flush()
                os.fsync(self._bits.fileno())
            for path in self.hidden[1:3]:  # deletes what a killed writer has left, or a link or pipe of that name
                path.unlink(missing_ok=True)
            with self.hidden[1].open("xb") as index:
                index.write(render_header(self._dtype, len(lengths), len(lengths) + 1))
                for table in (lengths, offsets, np.arange(len(lengths) + 1, dtype="<i8")):
                    index.write(table.tobytes())
                index.flush()
                os.fsync(index.fileno())
            with self.hidden[2].open("x", encoding="utf-8") as description:
                description.write(self._describe().render())
                description.flush()
                os.fsync(description.fileno())
        self._sealed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._temporary:
                if not self._sealed:
                    self.seal()
                self._publish()
        finally:
            self._discard()

    def _describe(self) -> Description:
        return Description(
            version("megalite"),
            fingerprint(*map(LocalFile, (*self.hidden[:2], *self.hidden[3:][: self._mask is not None]))),
            self.documents,
            self.tokens,
            self.largest_id,
            self.end_of_document,
            self._tokenizer,
            self._sources[:MAX_SOURCES],
            len(self._sources) + self._unlisted_sources,
            self.trained,
            self._packed,
        )

    def _publish(self) -> None:
        tokens, index, description, *mask = zip(self.hidden, self.files, strict=False)
        published: list[Path] = []
        try:
            with self._explained():
                for path in self._final[1:] if self._replace else ():  # .idx first: no reader sees a mixture
                    path.unlink(missing_ok=True)
                for temporary, final in (tokens, *mask, description, index):  # .idx last: readers need it
                    published.append(final)
                    temporary.replace(final)
                folder = os.open(self.prefix.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except BaseException:
            for path in published:
                path.unlink(missing_ok=True)
            raise

    def _discard(self) -> None:
        for temporary in self.hidden:
            with suppress(OSError):  # a folder of that name is none of ours
                temporary.unlink()
        with suppress(OSError):  # a full disk refuses the buffered tokens once more
            self._tokens.close()
        if self._bits is not None:
            with suppress(OSError):
                self._bits.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.prefix}: cannot write the store: {error.strerror or error}") from error


def sweep(prefix: str | Path) -> None:
    """Remove what a killed writer of the store `prefix` has left, unless a writer is at work."""
    writer = StoreWriter(prefix, token_dtype(1))
    if exists(writer.hidden[0]):
        with suppress(InputError, OSError), claim(writer.hidden[0], str(prefix)):
            for path in writer.hidden:
                path.unlink(missing_ok=True)
