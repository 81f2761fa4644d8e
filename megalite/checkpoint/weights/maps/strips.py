"""Tensors of another format, as made of our weights: the one description that reading and writing share.

A tensor of theirs is a row of strips, back to back. A strip is a block of one of our weights: neighbouring rows, of all
columns or of some. Fused projections, interleaved heads, tensor-parallel parts, stacked layers and padding are all
strips. Imports no torch.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import NamedTuple

from megalite.checkpoint.store.index import ITEM_BYTES, Chunk, Index, Stored
from megalite.plan.parts.part import Weight

PREFIX = "model."  # begins the name of a weight in an index


class Strip(NamedTuple):
    """A rectangle of one of our weights: its `rows`, cut to `columns`.

    A vector has one column. A stack of matrices has the rows of all of them, one matrix after the other.
    """

    name: str  # name of our weight
    rows: tuple[int, int]  # first, end
    columns: tuple[int, int]

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Theirs:
    """A tensor of another format. All its strips are equally wide; elements after the last strip are padding.

    padding: the row that is repeated in it; None: that before it. kind: begins the names, in an index by our names, of
    what the strips are of: the weights, or a state that an optimizer has of each. turns: the number of strips of an
    expert whose outputs take turns, see `woven`; 0: elements are in the order of strips.
    """

    shape: tuple[int, ...]
    strips: tuple[Strip, ...]
    padding: Strip | None = None
    kind: str = PREFIX
    turns: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def of(self) -> str:
        """The name of the first of our weights in it; empty for padding alone."""
        return self.strips[0].name if self.strips else ""

    def bytes(self, dtype: str) -> int:
        return self.elements * ITEM_BYTES[dtype]

    def unpiled(self) -> Iterator["Theirs"]:
        """Yield the parts of a pile, each as a pile of one: the inverse of `piled`."""
        each = len(self.strips) // self.shape[0]
        for first in range(0, len(self.strips), each):
            yield replace(self, shape=(1, *self.shape[1:]), strips=self.strips[first : first + each])


Table = Mapping[str, Theirs]  # by their names, in their order


def whole(name: str, weight: Weight) -> Strip:
    """Return the strip that is all of a weight."""
    return part(name, weight)


def part(
    name: str, weight: Weight, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
) -> Strip:
    """A block of a weight: all of its rows and columns, unless some are given."""
    width = weight.shape[-1] if len(weight.shape) > 1 else 1
    return Strip(name, rows or (0, weight.elements // width), columns or (0, width))


def boxes(
    shape: Sequence[int], rows: tuple[int, int], columns: tuple[int, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Place and sizes of a block of a weight of `shape`; where that is a stack, of the block's part of each matrix."""
    *stacked, height = shape[:-1] or shape
    first, end = rows
    while first < end:
        matrix, row = divmod(first, height)
        count = min(end - first, height - row)
        place = tuple(matrix // math.prod(stacked[dim + 1 :]) % size for dim, size in enumerate(stacked))
        offsets, sizes = (*place, row, columns[0]), (*[1] * len(place), count, columns[1] - columns[0])
        yield offsets[: len(shape)], sizes[: len(shape)]
        first += count


def stacked(named: Iterable[tuple[str, Weight]]) -> Theirs:
    """Stack whole weights along their first dimension."""
    pairs = list(named)
    rows = sum(weight.shape[0] for _, weight in pairs)
    return Theirs((rows, *pairs[0][1].shape[1:]), tuple(whole(name, weight) for name, weight in pairs))


def piled(each: Sequence[Theirs]) -> Theirs:
    """Pile tensors of one shape up along a new first dimension."""
    return Theirs((len(each), *each[0].shape), tuple(strip for theirs in each for strip in theirs.strips))


def under_our_names(index: Index, table: Table, shapes: Mapping[str, Weight], prefix: str) -> Index:
    """The index of the same files by our names, each begun with `prefix`.

    The tensors of `table` must be in `index`. Raises ValueError where one of them has another shape.
    """
    return Index.of(_chunks(index, table, shapes, prefix))


def _chunks(index: Index, table: Table, weights: Mapping[str, Weight], prefix: str) -> Iterator[Chunk]:
    for name, theirs in table.items():
        stored = index.tensors[name]
        if stored.shape != theirs.shape:
            raise ValueError(f"has {name} {list(stored.shape)} instead of {list(theirs.shape)}")
        if not theirs.strips:
            continue  # padding alone
        ends = list(accumulate(strip.height for strip in theirs.strips))
        for file, position, first, count, columns in _runs(stored, theirs.strips[0].width):
            while count:
                at = bisect_right(ends, first)
                if at == len(ends):
                    break  # padding
                strip, taken = theirs.strips[at], min(count, ends[at] - first)
                weight = weights[strip.name]
                row, column = strip.rows[1] - (ends[at] - first), strip.columns[0] + columns[0]
                for offsets, sizes in boxes(weight.shape, (row, row + taken), (column, column + columns[1])):
                    yield Chunk(
                        prefix + strip.name,
                        stored.dtype,
                        weight.shape,
                        index.files[file],
                        position,
                        offsets,
                        sizes,
                    )
                    position += math.prod(sizes) * ITEM_BYTES[stored.dtype]
                first, count = first + taken, count - taken


def _runs(stored: Stored, width: int) -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
    """The rows of a tensor, seen as a matrix of `width` columns, that lie back to back in a file.

    Yields the number of the file, the position, the first row, the number of rows, and of columns the first and count.
    """
    shape = stored.shape if width > 1 else (*stored.shape, 1)
    for row in stored.rows.tolist():
        file, position, *box = row
        offsets, sizes = box[: len(box) // 2], box[len(box) // 2 :]
        if width == 1:
            offsets, sizes = [*offsets, 0], [*sizes, 1]
        *outer, rows, _ = shape
        for place in product(*(range(size) for size in sizes[:-2])):
            number = 0
            for size, first, step in zip(outer, offsets, place, strict=False):
                number = number * size + first + step
            yield file, position, number * rows + offsets[-2], sizes[-2], (offsets[-1], sizes[-1])
            position += sizes[-2] * sizes[-1] * ITEM_BYTES[stored.dtype]
