"""Reads and makes tensors that have our experts' matrices in turns; see `maps.woven`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.checkpoint.weights.maps.woven import BLOCK, Woven

Read = Callable[[str, Tensor, Sequence[int]], None]  # fills a part of one of their tensors, from its first element on
MAX_ELEMENTS = 1 << 22  # elements of theirs that are read at a time, unless a row has more
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of e2m1; the fourth bit is their sign


def fill(read: Read, where: Woven, target: Tensor, offset: Sequence[int]) -> None:
    """Fill a part of a stack of ours, whose first element is at `offset`."""
    if vectors := target.ndim == 2:  # matrices of one column
        target, offset = target[..., None], (*offset, 0)
    expert, row, column = offset
    for number, ours in enumerate(target, expert):
        theirs = ours.T if where.transposed else ours
        begin, across = (column, row) if where.transposed else (row, column)
        # One of their dimensions has every `step`-th in it, and all in between are read.
        down, wide = (1, where.step) if where.transposed else (where.step, 1)
        lines = max(1, MAX_ELEMENTS // (down * wide * theirs.shape[1]))
        for start in range(0, len(theirs), lines):
            some = theirs[start : start + lines]
            box = torch.Size((down * len(some), wide * some.shape[1]))
            some.copy_(_matrix(read, where, (number, down * (begin + start), wide * across), box, vectors))


def _matrix(read: Read, where: Woven, place: Sequence[int], box: torch.Size, vectors: bool) -> Tensor:
    """Every `step`-th row, or column, of a box of one of their matrices, which begins at `place` in the stack."""
    turn = slice(where.first, None, where.step)
    if len(where.names) == 1:
        (name,) = where.names
        found = torch.empty(box, dtype=getattr(torch, where.index.tensors[name].dtype))
        if vectors:
            read(name, found[None, :, 0], place[:2])
        else:
            read(name, found[None], place)
        return found[:, turn] if where.transposed else found[turn]
    (number, row, column), (rows, columns) = place, box
    first, end = column // BLOCK, -(-(column + columns) // BLOCK)
    blocks = torch.empty(1, rows, end - first, BLOCK // 2, dtype=torch.uint8)
    scales = torch.empty(1, rows, end - first, dtype=torch.uint8)
    read(where.names[0], blocks, (number, row, first, 0))
    read(where.names[1], scales, (number, row, first))
    begin = column - first * BLOCK
    return unpacked(blocks[0, turn], scales[0, turn])[:, begin : begin + columns]


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers `[n, 32b]` in bf16 of blocks `[n, b, 16]` and scales `[n, b]`: exact, and NaN where the scale says so."""
    every = torch.tensor([*FP4, *(-number for number in FP4)], dtype=torch.bfloat16)
    pairs = torch.stack((every.repeat(16), every.repeat_interleave(16)), -1)  # by byte
    numbers = pairs[blocks.int()].flatten(-2)
    # The exponent of a bf16, whose lowest one is of numbers that have no leading 1.
    factors = (scales.short() << 7).masked_fill_(scales == 0, 1 << 6).view(torch.bfloat16)
    return numbers.mul_(factors.masked_fill_(scales == 255, torch.nan)[..., None]).flatten(1)


def interleaved(matrices: Sequence[Tensor], transposed: bool) -> Tensor:
    """One matrix of an expert in another program's layout, in which rows of our matrices `[out, in]` take turns.

    transposed: it is stored as `[in, out]`. Biases are given as vectors `[1, out]` and are transposed in no case.
    """
    return torch.stack([matrix.T if transposed else matrix for matrix in matrices], -1).flatten(-2)
