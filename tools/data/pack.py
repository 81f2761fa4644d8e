"""Packs the documents of a store into sequences of one length, by best fit decreasing, without cutting any.

Longer documents are placed first, each where it leaves the least room; among equals the one that comes first in the
data. The result is a function of the lengths alone.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError, counted, printable
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite_tools.data.documents import Reject, Skipped, refuse


@dataclass(frozen=True)
class Packed:
    """The sequences that documents were packed into."""

    documents: int
    sequences: int
    padding: int  # tokens


def best_fit_decreasing(lengths: NDArray[np.integer], room: int) -> NDArray[np.int64]:
    """The number of the sequence of `room` tokens that each document is put into. None may be longer."""
    placed = np.empty(len(lengths), np.int64)
    waiting: dict[int, deque[int]] = defaultdict(deque)  # sequences by the room they have left
    rooms = 0  # bit n: a sequence has room for n more tokens
    count = 0
    for document in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[document])
        if fitting := rooms >> length:
            left = length + (fitting & -fitting).bit_length() - 1  # the least that is enough
            chosen = waiting[left].popleft()
            rooms ^= 0 if waiting[left] else 1 << left
        else:
            left, chosen = room, count
            count += 1
        placed[document] = chosen
        if left > length:
            waiting[left - length].append(chosen)
            rooms |= 1 << left - length
    return placed


def longer(store: TokenStore, length: int) -> list[int]:
    """The documents of more than `length` tokens."""
    return np.flatnonzero(store.lengths[:] > length).tolist()


def pack(
    store: TokenStore,
    writer: StoreWriter,
    length: int,
    padding: int,
    advanced: Callable[[int], None] = lambda _: None,
) -> Packed:
    """Write all documents but those that are longer, in sequences of `length` tokens.

    The rest of a sequence is one more document of `padding` tokens, which are not trained. One more token ends the
    store: the target of the last. advanced: called with the tokens of each document that was written.
    """
    lengths = store.lengths[:]
    kept = np.flatnonzero(lengths <= length)
    placed = best_fit_decreasing(lengths[kept], length)
    padded, sequence, left = 0, 0, length
    for at in np.argsort(placed, kind="stable").tolist():
        if placed[at] > sequence:
            _pad(writer, left, padding)
            padded, sequence, left = padded + left, sequence + 1, length
        start, end = store.bounds(int(kept[at]))
        writer.add(store.read(start, end - start), store.trained(start, end - start))
        left -= end - start
        advanced(end - start)
    _pad(writer, left + 1, padding)
    return Packed(len(kept), sequence + 1, padded + left)


def write_packed(
    store: TokenStore,
    final: StoreWriter,
    length: int,
    on_error: Literal["stop", "skip"],
    skipped: Skipped,
    advanced: Callable[[int], None],
) -> None:
    """Pack a store's documents, which end with the token that `final` names, and print how full sequences are.

    on_error: "skip" leaves out documents that are longer. advanced: as for `pack`. Raises InputError if none fits.
    """
    end = final.end_of_document
    assert end is not None, "the caller has asked"
    too_long = longer(store, length)
    for document in too_long:
        detail = f"{store.lengths[document]:,} of {length:,} tokens; --pack cuts none, a larger LENGTH takes it"
        refuse(
            Reject(f"{final.prefix}, document {document}", "document longer than a sequence", detail), on_error, skipped
        )
    if len(too_long) == store.documents:
        raise InputError(f"{final.prefix}: no document fits into --pack {length}; use a larger LENGTH")
    found = pack(store, final, length, end, advanced)
    share = found.padding / (found.sequences * length)
    documents, sequences = counted(found.documents, "document"), counted(found.sequences, "sequence")
    filled = f"{documents} in {sequences} of {length:,} tokens, {share:.2%} padding, which counts as documents"
    print(printable(f"{final.prefix}: {filled}"))


def _pad(writer: StoreWriter, count: int, padding: int) -> None:
    if count:
        writer.add(np.full(count, padding), np.zeros(count, np.bool_))
