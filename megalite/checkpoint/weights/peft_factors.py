"""Reads and makes factors of PEFT's modules that are in another order than ours; see `maps.peft`."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megalite.checkpoint.weights.maps.peft import Factor, Within

Read = Callable[[str, Tensor, Sequence[int]], None]  # fills a part of a tensor, from its first element on


def fill(read: Read, where: Within, target: Tensor, offset: Sequence[int]) -> None:
    """Fill a part of one of our factors `[out, r]`, or `[E, out, r]`, whose first element is at `offset`."""
    stored = where.index.tensors[where.name]
    theirs = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    read(where.name, theirs, (0, 0))
    ours = _like(where.theirs, where.ours, theirs)
    for mine, yours in _pairs(where.theirs, theirs, where.ours, ours):
        mine.copy_(yours)
    target.copy_(ours[tuple(slice(at, at + size) for at, size in zip(offset, target.shape, strict=True))])


def made(read: Read, theirs: Factor, dtype: torch.dtype) -> Tensor:
    """A factor as PEFT stores it for one module, put together from our factors of that module's matrices."""
    found = torch.zeros(theirs.shape, dtype=dtype)
    for name in theirs.columns:
        ours = _like(theirs, name, found)
        read(theirs.kind + name, ours, [0] * ours.ndim)
        for mine, yours in _pairs(theirs, found, name, ours):
            yours.copy_(mine)
    return found


def _like(theirs: Factor, name: str, whole: Tensor) -> Tensor:
    """An empty tensor for one of our factors."""
    strips = [strip for strip in theirs.strips if strip.name == name]
    matrix = (max(strip.rows[1] for strip in strips), strips[0].width)
    return whole.new_empty(theirs.experts, *matrix) if theirs.experts else whole.new_empty(matrix)


def _pairs(theirs: Factor, whole: Tensor, name: str, ours: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views `[…, out, r]` of the same elements: of `ours`, called `name`, and of the `whole` factor of the module."""
    rank, first, whole = ours.shape[-1], theirs.columns[name], whole.T if theirs.transposed else whole
    each = whole.unflatten(1, (-1, theirs.experts)).permute(2, 0, 1) if theirs.experts else whole  # … out R
    for strip, rows in theirs.rows():
        if strip.name == name:
            yield ours[..., slice(*strip.rows), :], each[..., rows, first : first + rank]
