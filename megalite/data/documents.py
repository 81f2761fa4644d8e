"""Beginnings of documents in packed sequences."""

import numpy as np
from numpy.typing import NDArray


def document_begins(tokens: NDArray[np.int64], end_of_document: int | None) -> NDArray[np.int64]:
    """The positions at which documents begin in `tokens` `[s]`, without 0: after every end-of-document token."""
    if end_of_document is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(tokens[:-1] == end_of_document) + 1


def documents_within(begins: NDArray[np.int64], start: int, length: int) -> tuple[int, ...]:
    """The positions in the `length` tokens from `start` at which documents begin, relative to `start`; then `length`.

    begins: the positions in the whole stream, ascending. The document of the first token counts as beginning at 0.
    """
    first, last = np.searchsorted(begins, (start + 1, start + length))
    return (0, *(begins[first:last] - start).tolist(), length)
