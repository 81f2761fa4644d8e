"""Blocks of attention: which rows of queries attend to which rows of keys, without a mask."""

from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of queries and the rows of keys that they attend to, in some samples of a micro-batch.

    Without `documents`, every query attends to every key. With `documents`, there are as many keys as queries, and
    attention is causal within each document. `documents` are the rows at which documents begin and end: (0, …, number
    of rows).

    left: for n queries and m keys, query a attends to no key before a + m − n − left. FlashAttention counts the keys
    left of a query in the same way. With documents, the rule holds within each document, where n = m.
    mirrored: attention within documents is anti-causal: query a attends to the keys from a on.
    """

    samples: slice
    queries: slice
    keys: slice
    documents: tuple[int, ...] = ()
    offsets: Tensor | None = None  # `documents` as int32 on the device, if it is a GPU and there are several documents
    left: int | None = None
    mirrored: bool = False

    @property
    def pieces(self) -> list[tuple[slice, bool]]:
        """Ranges of queries that attend to the same ranges of keys, each with whether attention is causal."""
        return [(slice(*ends), True) for ends in pairwise(self.documents)] or [(slice(None), False)]


def triangles(block: Block) -> list[Block]:
    """Splits `block` into blocks without `left` that have the same pairs of queries and keys.

    These are rectangles, causal triangles and anti-causal triangles. A document is cut every `left` rows. In its own
    part, a query then attends to the keys up to itself, a causal triangle. In the part before, it attends to the keys
    from the one at the same place on, an anti-causal triangle.
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


def reachable(block: Block) -> list[Block]:
    """Splits `block` into blocks whose pairs of queries and keys FlashAttention on CUDA can express.

    With a window on the left alone, query a of n over m keys attends there to no key behind a + 2m − n: too few where
    there are more queries than keys. The queries whose window begins before the first key attend to all keys.
    """
    queries, keys = (rows.stop - rows.start for rows in (block.queries, block.keys))
    if block.left is None or block.documents or queries <= keys:
        return [block]
    edge = min(queries, queries + block.left - keys)
    found = [_part(block, (0, edge), (0, keys))]
    if edge < queries:
        found.append(replace(_part(block, (edge, queries), (0, keys)), left=block.left))
    return found


def _far_edges(block: Block, begin: int, end: int, left: int) -> list[Block]:
    """Blocks of a document longer than the window: each of its parts attends to the part before."""
    found = [_part(block, (begin + left, end), (begin, end - left), mirrored_every=left)]
    last = end - (end - begin) % left  # begin of a shorter part; all its queries attend to the keys from end − left
    if last < end:
        found.append(_part(block, (last, end), (end - left, last)))
    return found


def _far_edge(block: Block, queries: int, keys: int, left: int) -> list[Block]:
    """Blocks of queries that come after all keys: the first queries attend to all keys, each later one to one less."""
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
    """The block of these queries and keys of `block`: all pairs, or mirrored triangles of `mirrored_every` rows."""
    rows, columns = (
        slice(whole.start + begin, whole.start + end)
        for whole, (begin, end) in ((block.queries, queries), (block.keys, keys))
    )
    size = queries[1] - queries[0]
    documents = (*range(0, size, mirrored_every), size) if mirrored_every else ()
    return Block(block.samples, rows, columns, documents, mirrored=bool(mirrored_every))
