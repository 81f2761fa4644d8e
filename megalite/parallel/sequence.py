"""Positions of a sequence that each rank of a context-parallel group holds, and the blocks of attention that follow.

A rank's rows are its positions in ascending order. So a document, which is an interval of positions, is an interval of
rows too. If all keys come before all queries, only the document of the last key can have both keys and queries. Its
block is one rectangle, which needs no mask.

With a window of w, a query attends to at most w positions: its own and those just before. Rows that are neighbours on a
rank can be far apart in the sequence. So with a window, there are blocks for each pair of a rank's parts.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from megalite.parallel.blocks import Block

Method = Literal["ring", "ulysses", "all_gather"]
Rows = tuple[range, ...]  # positions, ascending
Documents = tuple[int, ...]  # the positions at which documents begin, and the length of the sequence


@dataclass(frozen=True)
class Sequences:
    """Samples of a micro-batch that are cut into the same documents."""

    samples: slice
    documents: Documents


def joined(documents: Sequence[Documents]) -> Documents:
    """The documents of samples, given for each, in the sequence in which these lie one behind the other."""
    begins, length = [], 0
    for cuts in documents:
        begins += [length + cut for cut in cuts[:-1]]
        length += cuts[-1]
    return (*begins, length)


def rows(method: Method, cp: int, rank: int, length: int) -> Rows:
    """The positions of `rank`: one part for ulysses, else a chunk from each half, which balances causal work."""
    if method == "ulysses" or cp == 1:
        part = length // cp
        return (range(rank * part, (rank + 1) * part),)
    chunk = length // (2 * cp)
    return tuple(range(i * chunk, (i + 1) * chunk) for i in (rank, 2 * cp - 1 - rank))


def split(x: Tensor, mine: Rows) -> Tensor:
    """The rows `mine` of `[length, …]`."""
    return torch.cat([x[part.start : part.stop] for part in mine])


def unsplit(parts: Sequence[Tensor], method: Method) -> Tensor:
    """The whole `[length, …]`, joined from the rows of all ranks, in the order of ranks: the inverse of `split`."""
    cp, length = len(parts), sum(map(len, parts))
    pieces: list[tuple[int, Tensor]] = []
    for rank, part in enumerate(parts):
        held = rows(method, cp, rank, length)
        pieces += zip((piece.start for piece in held), part.split([len(piece) for piece in held]), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda entry: entry[0])])


def own_blocks(
    mine: Rows, sequences: Sequence[Sequences], device: torch.device, window: int | None = None
) -> list[Block]:
    """The blocks in which a rank's rows attend to rows of the same rank, causally within each document."""
    if window is None:
        return _own(mine, mine, sequences, device)
    return [
        block
        for i, part in enumerate(mine)
        for block in (
            *_own(mine, (part,), sequences, device, window - 1),
            *_past_in_window(mine, (part,), mine[:i], sequences, window),
        )
    ]


def _own(
    mine: Rows, parts: Rows, sequences: Sequence[Sequences], device: torch.device, left: int | None = None
) -> list[Block]:
    """The blocks in which the rows of neighbouring `parts` of a rank attend to each other."""
    first, last = _below(mine, parts[0].start), _below(mine, parts[-1].stop)
    found = []
    for sequence in sequences:
        cuts = tuple(sorted({_below(parts, begin) for begin in sequence.documents}))
        offsets = None
        if len(cuts) > 2 and device.type == "cuda":
            offsets = torch.tensor(cuts, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)
        found.append(Block(sequence.samples, slice(first, last), slice(first, last), cuts, offsets, left))
    return found


def blocks_of_joined(length: int, documents: Documents, device: torch.device, window: int | None = None) -> list[Block]:
    """The blocks of samples of `length` that lie one behind the other in one sequence: as many as there are samples.

    documents: of the whole sequence; none goes on from one sample to the next.
    """
    whole, left = (range(documents[-1]),), None if window is None else window - 1
    parts = (range(begin, begin + length) for begin in range(0, documents[-1], length))
    return [
        block for part in parts for block in _own(whole, (part,), [Sequences(slice(None), documents)], device, left)
    ]


def ring_steps(cp: int, rank: int, length: int, sequences: Sequence[Sequences]) -> list[list[Block]]:
    """The blocks of the ring's steps 1, 2, …, which use the keys and values of ranks rank − 1, rank − 2, …."""
    mine = rows("ring", cp, rank, length)
    others = (rows("ring", cp, (rank - step) % cp, length) for step in range(1, cp))
    return [list(_past(mine, theirs, sequences)) for theirs in others]


def gaps(mine: Rows, sequences: Sequence[Sequences], window: int | None = None) -> list[tuple[range, list[Block]]]:
    """The gaps before and between a rank's rows that these rows attend to, each with the blocks over its keys."""
    between = missing(mine, window)
    if window is None:
        return [(gap, list(_past(mine, (gap,), sequences))) for gap in between]
    return [(gap, list(_past_in_window(mine, mine, (gap,), sequences, window))) for gap in between]


def missing(mine: Rows, window: int | None = None) -> Rows:
    """The gaps before and between a rank's rows; with a window, only the positions that some of its rows attend to."""
    starts = [0, *(part.stop for part in mine[:-1])]
    if window is not None:
        starts = [max(start, part.start - window + 1) for start, part in zip(starts, mine, strict=True)]
    return tuple(range(start, part.start) for start, part in zip(starts, mine, strict=True) if start < part.start)


def overlaps(wanted: Rows, held: Rows) -> list[range]:
    """The positions in both, in an order on which sender and receiver agree."""
    found = (range(max(x.start, y.start), min(x.stop, y.stop)) for x in wanted for y in held)
    return [positions for positions in found if positions]


def place(held: Rows, positions: range) -> slice:
    """The rows of `positions` among the rows of `held`."""
    return slice(_below(held, positions.start), _below(held, positions.stop))


def _past(queries: Rows, keys: Rows, sequences: Sequence[Sequences]) -> Iterator[Block]:
    """Yield for each sequence the block over those `keys`, held by another rank, that come before some `queries`."""
    earlier = [part for part in keys if part.stop <= queries[-1].start]
    if not earlier:
        return
    end = earlier[-1].stop
    first = _below(queries, end)
    for sequence in sequences:
        document = bisect_right(sequence.documents, end - 1)  # index of the end of the last key's document
        last = _below(queries, sequence.documents[document])
        if first < last:
            begin = sequence.documents[document - 1]
            yield Block(sequence.samples, slice(first, last), slice(_below(keys, begin), _below(keys, end)))


def _past_in_window(
    mine: Rows, queries: Rows, keys: Rows, sequences: Sequence[Sequences], window: int
) -> Iterator[Block]:
    """One block for each sequence, part of `queries` (which are rows of `mine`) and earlier part of `keys`."""
    for part, earlier, sequence in product(queries, keys, sequences):
        end = earlier.stop
        if end > part.start:
            continue
        document = bisect_right(sequence.documents, end - 1)  # index of the end of the last key's document
        begin = max(earlier.start, sequence.documents[document - 1], part.start - window + 1)
        last = min(part.stop, sequence.documents[document], end + window - 1)  # the end of the queries
        if begin < end and part.start < last:
            left = end + window - 1 - last
            columns, reach = place(keys, range(begin, end)), left if left < end - begin - 1 else None
            yield Block(sequence.samples, place(mine, range(part.start, last)), columns, left=reach)


def _below(held: Rows, position: int) -> int:
    """The number of rows of `held` before `position`."""
    return sum(len(range(part.start, min(part.stop, position))) for part in held)
