"""Blocks of attention: which rows of queries attend to which rows of keys, without a mask."""

from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of queries and the rows of keys that they attend to, in some samples of a micro-batch.

    Without `documents` every query attends to every key. With them there are as many keys as queries, and attention is
    causal within each document: (0, …, number of rows) are the places where documents begin and end.

    left: of n queries and m keys, query a attends to no key before a + m − n − left. That is how FlashAttention counts
    the keys left of a query. With documents it holds in each, where n = m.
    mirrored: attention within documents is anti-causal, so that query a attends to the keys from a on.
    """

    samples: slice
    queries: slice
    keys: slice
    documents: tuple[int, ...] = ()
    offsets: Tensor | None = None  # `documents` on the device, int32, where it is a GPU and they are several
    left: int | None = None
    mirrored: bool = False

    @property
    def pieces(self) -> list[tuple[slice, bool]]:
        """Ranges that attend to their counterparts, and whether causally."""
        return [(slice(*ends), True) for ends in pairwise(self.documents)] or [(slice(None), False)]


def triangles(block: Block) -> list[Block]:
    """The same pairs of queries and keys as blocks that need no `left`: rectangles, and triangles of either kind.

    A document is cut every `left` rows. A query then attends to the keys of its own part up to itself, which is a
    causal triangle, and to those of the part before from its counterpart on, which is an anti-causal one.
    """
    left = block.left
    if left is None:
        return [block]
    if not block.documents:
        queries, keys = (rows.stop - rows.start for rows in (block.queries, block.keys))
        return _far_edge(block, queries, keys, left)
    cuts, edges = [0], []
    for begin, end in pairwise(block.documents):
        inside = end - begin <= left + 1  # the last query attends to the first key
        step = end - begin if inside else max(left, 1)
        cuts += [*range(begin + step, end, step), end]
        if not inside and left:
            edges += _far_edges(block, begin, end, left)
    return [replace(block, documents=tuple(cuts), offsets=None, left=None), *edges]


def _far_edges(block: Block, begin: int, end: int, left: int) -> list[Block]:
    """Of a document that is longer than the window: what its parts attend to in the parts before."""
    found = [_part(block, (begin + left, end), (begin, end - left), mirrored_every=left)]
    last = end - (end - begin) % left  # of the last part, the keys that all of its queries attend to
    if last < end:
        found.append(_part(block, (last, end), (end - left, last)))
    return found


def _far_edge(block: Block, queries: int, keys: int, left: int) -> list[Block]:
    """Of queries that come after all of the keys: the first attend to all of these, each later one to one key less."""
    edge = min(queries, queries + left - keys)  # the last query that attends to all keys
    found = []
    if edge > 0:
        found.append(_part(block, (0, edge), (0, keys)))
    if edge < queries:
        certain = queries - edge  # the first key that the last query attends to
        found.append(_part(block, (edge, queries), (0, certain), mirrored_every=certain))
        if certain < keys:
            found.append(_part(block, (edge, queries), (certain, keys)))
    return found


def _part(block: Block, queries: tuple[int, int], keys: tuple[int, int], mirrored_every: int = 0) -> Block:
    """A part of the rows of a block, whose queries attend to all of these keys, or as `mirrored` says."""
    rows, columns = (
        slice(whole.start + begin, whole.start + end)
        for whole, (begin, end) in ((block.queries, queries), (block.keys, keys))
    )
    size = queries[1] - queries[0]
    documents = (*range(0, size, mirrored_every), size) if mirrored_every else ()
    return Block(block.samples, rows, columns, documents, mirrored=bool(mirrored_every))
