"""Experts as gpt-oss has them on disk: where each of our matrices lies in tensors that strips cannot describe.

Theirs of a layer is a stack of matrices, one for each expert. Each is transposed, `[in, out]`, and where it is of gate
and up, their outputs take turns: gate 0, up 0, gate 1, up 1 … So do those of biases. In blocks of 4 bits (MXFP4, OCP
Microscaling Formats 1.0) a matrix is `[out, in]`: `…_blocks [E, out, in / 32, 16]` has two numbers in a byte, the lower
bits first, and `…_scales [E, out, in / 32]` the exponent of two of each 32 numbers, plus 127. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megalite.checkpoint.store.index import Index, Stored
from megalite.checkpoint.weights.maps.strips import PREFIX, Strip, Table, Theirs, part
from megalite.plan.parts.part import Weight

BLOCK = 32  # numbers with one scale
BLOCKS, SCALES = "_blocks", "_scales"  # end the names of the two tensors
UNPACKED = "bfloat16"  # holds all numbers of 4 bits with their scales, and is what transformers makes of them


@dataclass(frozen=True)
class Woven:
    """The place of one of our stacks of matrices.

    index: of the tensors it is in, by `names`: one, or blocks and scales. first, step: our rows are every `step`-th of
    their matrices, or of the columns of these if they are `transposed`, from `first` on.
    """

    index: Index
    names: tuple[str, ...]
    first: int
    step: int
    transposed: bool


def woven(name: str, parts: Mapping[str, Weight]) -> Iterator[tuple[str, Theirs]]:
    """The tensor `name` of our stacks of matrices, or of vectors, in turns."""
    (shape,) = {weight.shape for weight in parts.values()}
    count, *matrix = shape
    height = matrix[0] if len(matrix) > 1 else 1  # rows of a strip for each expert
    strips = [
        part(each, weight, rows=(number * height, (number + 1) * height))
        for number in range(count)
        for each, weight in parts.items()
    ]
    *inputs, outputs = reversed(matrix)
    yield name, Theirs((count, *inputs, len(parts) * outputs), tuple(strips), turns=len(parts))


def tensors_of(table: Table, index: Index) -> Iterator[str]:
    """The names of the tensors of `table`, as files have them whose `index` is given."""
    for name, theirs in table.items():
        packed = theirs.turns and name + BLOCKS in index.tensors
        yield from (name + BLOCKS, name + SCALES) if packed else (name,)


def places(index: Index, table: Table, shapes: Mapping[str, Weight]) -> tuple[dict[str, Stored], dict[str, Woven]]:
    """Our tensors of those in `table` that are woven, by our names in an index. Raises ValueError for other shapes."""
    found, where = dict[str, Stored](), dict[str, Woven]()
    for name, theirs in table.items():
        if not theirs.turns:
            continue
        packed = name + BLOCKS in index.tensors
        names = (name + BLOCKS, name + SCALES) if packed else (name,)
        tensors = {each: index.tensors[each] for each in names}
        wanted = [theirs.shape]
        if packed:
            count, inputs, outputs = theirs.shape
            if inputs % BLOCK:
                raise ValueError(f"has {name}{BLOCKS}, though {inputs} is no multiple of {BLOCK}")
            wanted = [(count, outputs, inputs // BLOCK, BLOCK // 2), (count, outputs, inputs // BLOCK)]
        for each, shape in zip(tensors, wanted, strict=True):
            stored = tensors[each]
            if stored.shape != shape or (packed and stored.dtype != "uint8"):
                raise ValueError(f"has {each} {stored.dtype} {list(stored.shape)} instead of {list(shape)}")
        dtype = UNPACKED if packed else tensors[name].dtype
        inside = Index(index.files, tensors)
        for first, strip in enumerate(theirs.strips[: theirs.turns]):
            shape = shapes[strip.name].shape
            transposed = len(shape) == 3 and not packed
            found[PREFIX + strip.name] = Stored(dtype, shape, np.empty((0, 2 + 2 * len(shape)), np.int64))
            where[PREFIX + strip.name] = Woven(inside, names, first, theirs.turns, transposed)
    return found, where


def groups(theirs: Theirs) -> Iterator[tuple[Strip, ...]]:
    """The strips of each expert."""
    for start in range(0, len(theirs.strips), theirs.turns):
        yield theirs.strips[start : start + theirs.turns]
