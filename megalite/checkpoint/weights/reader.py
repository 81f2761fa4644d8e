"""Reading tensors: bytes from where an index says, into whatever part of a tensor is wanted."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError, damage_of, opened, read_at, read_whole
from megalite.checkpoint.store.index import ITEM_BYTES, MAX_INDEX_BYTES, Index, Stored
from megalite.checkpoint.store.manifest import INDEX, Manifest
from megalite.checkpoint.weights import peft_factors, woven
from megalite.checkpoint.weights.maps.peft import Within
from megalite.checkpoint.weights.maps.woven import Woven
from megalite.parallel.parameter import box

NO_FACTORS: Mapping[str, float] = MappingProxyType({})
NONE_WOVEN: Mapping[str, Woven | Within] = MappingProxyType({})
NONE_SHARED: Mapping[str, str] = MappingProxyType({})
BLOCK = 1 << 22  # bytes read at a time, unless a row of a chunk is larger


class Reader:
    """The tensors in the files of the folder `path`, which lie where `index` says.

    sizes: of the files, in bytes. source: the file that the index is from. links: whether files may be links, as in the
    cache of a hub. factors: what tensors are multiplied by when they are read, by name; others stay. woven: places of
    tensors that have no chunks. shared: names of tensors that lie where others do, and those. Methods raise
    DamagedError where files are not as the index says.
    """

    def __init__(
        self,
        path: Path,
        index: Index,
        sizes: Mapping[str, int],
        source: str = INDEX,
        links: bool = False,
        factors: Mapping[str, float] = NO_FACTORS,
        woven: Mapping[str, Woven | Within] = NONE_WOVEN,
        shared: Mapping[str, str] = NONE_SHARED,
    ) -> None:
        self.path, self.index, self.sizes, self.source, self.links = path, index, sizes, source, links
        self.factors, self.woven, self.shared = factors, woven, shared

    @staticmethod
    def of_checkpoint(path: Path, manifest: Manifest) -> "Reader":
        """Open megalite's checkpoint `path`; only its index is compared with its hash. Raises DamagedError."""
        with damage_of(path, INDEX):
            index = Index.decode(read_whole(path, INDEX, MAX_INDEX_BYTES, manifest.files[INDEX]))
        return Reader(path, index, {name: file.bytes for name, file in manifest.files.items()})

    def check(self, names: Iterable[str]) -> None:
        """Check that the positions of the tensors `names` are possible."""
        with damage_of(self.path, self.source):
            places = dict.fromkeys(self.shared.get(name, name) for name in names)
            self.index.check(self.sizes, (name for name in places if name not in self.woven))
            for where in self.woven.values():
                where.index.check(self.sizes, where.names)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`, after a check of their positions and shapes; of a DTensor, this rank's part."""
        self.check(tensors)
        for name, tensor in tensors.items():
            if (there := self.index.tensors[name].shape) != tuple(tensor.shape):
                raise DamagedError(self.path, f"{self.source} has {name} {list(there)} instead of {list(tensor.shape)}")
        self.fill_parts((name, *part_of(tensor)) for name, tensor in tensors.items())

    def fill_parts(self, parts: Iterable[tuple[str, Tensor, Sequence[int]]]) -> None:
        """Fill parts of tensors that were checked, each given by name, target, and its first element's place."""
        stored, pieces = self.index.tensors, list[WantedPart]()
        for name, part, offset in parts:
            if (where := self.woven.get(name)) is not None:
                theirs = Reader(self.path, where.index, self.sizes, self.source, self.links)
                read = partial(_fill_part, theirs)
                if isinstance(where, Within):
                    peft_factors.fill(read, where, part, offset)
                else:
                    woven.fill(read, where, part, offset)
            else:
                pieces += _pieces(stored[name], part, offset, self.factors.get(name, 1.0))
        pieces.sort(key=lambda piece: (piece.file, piece.position))
        if not pieces:
            return
        longest = max([min(BLOCK, sum(piece.bytes for piece in pieces)), *(piece.row_bytes for piece in pieces)])
        scratch = allocated(self.path, (longest,), torch.uint8)
        for number, group in groupby(pieces, key=lambda piece: piece.file):
            name = self.index.files[number]
            with opened(self.path, name, self.links) as descriptor:
                read = partial(read_at, self.path, name, descriptor)
                for piece in group:
                    piece.read(scratch, read)


def _fill_part(reader: Reader, name: str, part: Tensor, offset: Sequence[int]) -> None:
    reader.fill_parts([(name, part, offset)])


@dataclass(frozen=True)
class WantedPart:
    """The part of a chunk that is wanted."""

    file: int
    position: int  # byte of the file at which the chunk begins
    dtype: torch.dtype
    sizes: tuple[int, ...]  # sizes of the chunk
    first: tuple[int, ...]  # element of the chunk that is wanted
    target: Tensor
    factor: float = 1.0

    @property
    def row_bytes(self) -> int:
        """The bytes of all elements with the same position in the first dimension."""
        return math.prod(self.sizes[1:]) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """The bytes that are read for `target`."""
        return len(self.target) * self.row_bytes

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
            values = block.view(self.dtype).view(-1, *self.sizes[1:])[:, *inner]
            # In float64, so that a product is rounded once, to the data type of the target.
            target.copy_(values if self.factor == 1 else values.double() * self.factor)


def allocated(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, to read into from `path`. Raises InputError if there is no memory for it."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:
        asked = math.prod(shape) * dtype.itemsize
        raise InputError(f"{path}: takes {asked:,} bytes of memory at a time, more than there is") from None


def part_of(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's part of a tensor, and the place of its first element."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.ndim
    return tensor.to_local(), box(tensor)[1]


def _pieces(stored: Stored, part: Tensor, offset: Sequence[int], factor: float) -> Iterator[WantedPart]:
    """The pieces of the chunks of `stored` that make up `part`, whose first element is at `offset`."""
    low = np.array(offset, np.int64)
    first = np.maximum(stored.offsets, low)
    last = np.minimum(stored.offsets + stored.sizes, low + np.array(part.shape, np.int64))
    for row in np.flatnonzero((first < last).all(axis=1)):
        target = part[tuple(slice(a, b) for a, b in zip(first[row] - low, last[row] - low, strict=True))]
        sizes, start = stored.sizes[row].tolist(), (first[row] - stored.offsets[row]).tolist()
        position = int(stored.rows[row, 1])
        while target.ndim > 1 and len(target) == 1:  # rows are those inside, so that no more than these are read
            number, *start = start
            sizes = sizes[1:]
            position += number * math.prod(sizes) * ITEM_BYTES[stored.dtype]
            target = target[0]
        yield WantedPart(
            file=int(stored.rows[row, 0]),
            position=position,
            dtype=getattr(torch, stored.dtype),
            sizes=tuple(sizes) or (1,),
            first=tuple(start) or (0,),
            target=target if target.ndim else target.reshape(1),
            factor=factor,
        )
