"""The documents in packed sequences."""

import numpy as np
from numpy.typing import NDArray


def document_begins(tokens: NDArray[np.int64], end_of_document: int | None) -> NDArray[np.int64]:
    """Where documents begin in `tokens` `[s]`, 0 left out: after every end-of-document token, if there is one."""
    if end_of_document is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(tokens[:-1] == end_of_document) + 1


def documents_within(begins: NDArray[np.int64], start: int, length: int) -> tuple[int, ...]:
    """Where documents begin in the `length` tokens from `start`, counted from there, and `length` at last.

    begins: where they do in the whole, ascending. What the first tokens belong to begins at 0.
    """
    first, last = np.searchsorted(begins, (start + 1, start + length))
    return (0, *(begins[first:last] - start).tolist(), length)
