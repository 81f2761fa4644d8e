"""The documents that are held out for validation, drawn by their numbers: whoever writes them draws the same."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def in_validation(document: int, seed: int, fraction: float) -> bool:
    """Return whether a document belongs to the validation split; depends only on the arguments."""
    return drawn_number(document, seed) < fraction * 2**64


def drawn_number(document: int, seed: int) -> int:
    """The number below 2**64 that a document has drawn; the lowest are held out."""
    return int.from_bytes(blake2b(f"{seed}/{document}".encode(), digest_size=8).digest(), "little")


def held_out(documents: int, seed: int, fraction: float | None, count: int | None) -> NDArray[np.bool_]:
    """Mark the documents that are held out: by `fraction` each by itself, else the `count` that draw the lowest."""
    if fraction is not None:
        return np.fromiter((in_validation(each, seed, fraction) for each in range(documents)), np.bool_, documents)
    drawn = np.fromiter((drawn_number(each, seed) for each in range(documents)), np.uint64, documents)
    held = np.zeros(documents, np.bool_)
    held[np.argsort(drawn, kind="stable")[:count]] = True
    return held
