"""The documents in packed sequences."""

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import InputError
from megalite.config.schema import Data
from megalite.data.tokenizer import load_tokenizer


def boundaries(tokens: NDArray[np.int64], end_of_document: int) -> tuple[int, ...]:
    """Where the documents in `tokens` `[s]` begin, and s at last: one begins after every end-of-document token."""
    begins = np.flatnonzero(tokens[:-1] == end_of_document) + 1
    return (0, *begins.tolist(), len(tokens))


def end_of_document(data: Data, vocab_size: int) -> int:
    """The id of the token that ends documents, as configured or as the tokenizer says. Raises InputError."""
    if data.end_of_document is not None:
        return data.end_of_document
    if data.tokenizer is None:
        raise InputError("data.end_of_document: is missing; give the id of the token, or set data.tokenizer")
    end = load_tokenizer(data.tokenizer).eod
    if end is None:
        raise InputError(
            f"data.tokenizer = {data.tokenizer}: knows no end-of-document token; set data.end_of_document to its id"
        )
    if end >= vocab_size:
        raise InputError(
            f"data.tokenizer = {data.tokenizer}: its end-of-document token {end} is outside model.vocab_size = "
            f"{vocab_size}; was the store made with another tokenizer?"
        )
    return end
