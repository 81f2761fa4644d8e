"""Reading tensors: bytes from where the index says, into whatever part of a tensor is wanted."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megalite.checkpoint.disk import DamagedError, damage_of, opened, read_at, read_whole
from megalite.checkpoint.index import LIMIT, Index, Stored
from megalite.checkpoint.manifest import INDEX, Manifest
from megalite.config.errors import InputError

BLOCK = 1 << 22  # bytes read at a time, unless a row of a chunk is larger


class Reader:
    """The tensors of the checkpoint `path`. Raises DamagedError if it is not as it was written.

    Only the hash of the index is checked.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        with damage_of(path, INDEX):
            self.index = Index.decode(read_whole(path, INDEX, LIMIT, manifest.files[INDEX]))

    def check(self, names: Iterable[str]) -> None:
        """Check that the positions of the tensors `names` are possible."""
        with damage_of(self.path, INDEX):
            self.index.check({name: file.bytes for name, file in self.manifest.files.items()}, names)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`; of a DTensor, this rank's part."""
        self.check(tensors)
        for name, tensor in tensors.items():
            if (there := self.index.tensors[name].shape) != tuple(tensor.shape):
                raise DamagedError(self.path, f"{INDEX} has {name} {list(there)} instead of {list(tensor.shape)}")
        pieces = [piece for name, tensor in tensors.items() for piece in _pieces(self.index.tensors[name], tensor)]
        pieces.sort(key=lambda piece: (piece.file, piece.position))
        longest = max([BLOCK, *(piece.row_bytes for piece in pieces)])
        scratch = allocated(self.path, (longest,), torch.uint8)
        for number, group in groupby(pieces, key=lambda piece: piece.file):
            name = self.index.files[number]
            with opened(self.path, name) as descriptor:
                read = partial(read_at, self.path, name, descriptor)
                for piece in group:
                    piece.read(scratch, read)


@dataclass(frozen=True)
class Piece:
    """The part of a chunk that is wanted."""

    file: int
    position: int  # of the chunk's first byte
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of the chunk
    first: tuple[int, ...]  # element of the chunk that is wanted
    target: Tensor

    @property
    def row_bytes(self) -> int:
        """The bytes of all elements with the same position in the first dimension."""
        return math.prod(self.sizes[1:]) * self.dtype.itemsize

    @torch.no_grad()
    def read(self, scratch: Tensor, read: Callable[[memoryview, int], None]) -> None:
        """Fill `target`, one or more whole rows at a time."""
        inner = tuple(
            slice(first, first + size) for first, size in zip(self.first[1:], self.target.shape[1:], strict=True)
        )
        step = max(1, len(scratch) // self.row_bytes)
        for start in range(0, len(self.target), step):
            target = self.target[start : start + step]
            block = scratch[: len(target) * self.row_bytes]
            read(block.numpy().data, self.position + (self.first[0] + start) * self.row_bytes)
            target.copy_(block.view(self.dtype).view(-1, *self.sizes[1:])[:, *inner])


def allocated(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, to read into from `path`. Raises InputError if there is no memory for it."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:
        asked = math.prod(shape) * dtype.itemsize
        raise InputError(f"{path}: takes {asked:,} bytes of memory at a time, more than there is") from None


def _pieces(stored: Stored, tensor: Tensor) -> Iterator[Piece]:
    """The pieces of the chunks of `stored` that make up this rank's part of `tensor`."""
    offset, part = [0] * tensor.ndim, tensor
    if isinstance(tensor, DTensor):
        part = tensor.to_local()
        offset = list(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])
    low = np.array(offset, np.int64)
    first = np.maximum(stored.offsets, low)
    last = np.minimum(stored.offsets + stored.sizes, low + np.array(part.shape, np.int64))
    for row in np.flatnonzero((first < last).all(axis=1)):
        target = part[tuple(slice(a, b) for a, b in zip(first[row] - low, last[row] - low, strict=True))]
        yield Piece(
            file=int(stored.rows[row, 0]),
            position=int(stored.rows[row, 1]),
            dtype=getattr(torch, stored.dtype),
            sizes=tuple(stored.sizes[row].tolist()) or (1,),
            first=tuple((first[row] - stored.offsets[row]).tolist()) or (0,),
            target=target if target.ndim else target.reshape(1),
        )
