"""Reading tensors: bytes from where the index says, into whatever part of a tensor is wanted."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
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
from megalite.checkpoint.weights.formats.opened import COPY, Merging, Weights
from megalite.checkpoint.weights.maps.peft import Within
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.maps.upcycled import BEGUN, Upcycling, dense_name
from megalite.checkpoint.weights.maps.woven import Woven
from megalite.checkpoint.weights.merged import BASE
from megalite.config.layers import adapter_of
from megalite.config.schema import Config
from megalite.model.fingerprint import MODULUS, fingerprint
from megalite.model.init import fill_normal
from megalite.parallel.parameter import box
from megalite.plan.model.parametrization import standard_deviation
from megalite.plan.model.weights import weights
from megalite.plan.parts.adapted import factor_names
from megalite.plan.parts.roles import ROUTER
from megalite_kernels.nf4 import BLOCK as BLOCK_VALUES
from megalite_kernels.nf4 import dequantize_nf4, quantize_nf4

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
        self.fill_parts((name, *_part(tensor)) for name, tensor in tensors.items())

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


def reader_of(found: Weights) -> Reader:
    """Make a reader of weights of any format and check all positions. Raises DamagedError if one is impossible."""
    if found.dense is not None and found.upcycling is not None:
        return UpcycledReader(found, found.dense, found.upcycling)
    if found.dense is not None and found.merging is not None:
        return MergedReader(found, reader_of(found.dense), found.merging)
    reader = Reader(
        found.path, found.index, found.sizes, found.source, found.links, found.factors, found.woven, found.shared
    )
    reader.check(found.index.tensors)
    return reader


class UpcycledReader(Reader):
    """The weights `found`, which a `dense` model's become when they are read; see `maps.upcycled`."""

    def __init__(self, found: Weights, dense: Weights, way: Upcycling) -> None:
        super().__init__(found.path, found.index, found.sizes, found.source, found.links)
        self.way = way
        self.dense = {  # the same tensors, multiplied for those who take slices of them
            factor: reader_of(replace(dense, factors=_multiplied(dense, factor)))
            for factor in {1.0, way.factor, way.shared_factor}
        }
        self.weights = {PREFIX + name: weight for name, weight in weights(found.model).items()}

    def check(self, names: Iterable[str]) -> None:
        """Check nothing: the dense model's positions are checked."""

    def fill_parts(self, parts: Iterable[tuple[str, Tensor, Sequence[int]]]) -> None:
        """Fill parts of tensors, those of experts with slices of the dense model's, with `noise` added."""
        parts = list(parts)
        pieces = [piece for part in parts for piece in self._read(*part)]
        for factor, reader in self.dense.items():
            reader.fill_parts(piece for its_factor, piece in pieces if its_factor == factor)
        for name, part, offset in parts:
            weight, key = self.weights[name], f"{self.way.seed}/{name.removeprefix(PREFIX)}"
            if weight.role == ROUTER and name.endswith(".router.weight"):
                for row, target in enumerate(part, offset[0]):
                    place = (row // self.way.slices * self.way.slices, offset[1])
                    std = standard_deviation(self.way.model, ROUTER)
                    fill_normal(target[None], weight.shape, place, std, key)
            elif weight.role in BEGUN:
                part.zero_()
            elif weight.role.of_expert and self.way.noise:
                noise = allocated(self.path, part.shape, torch.float32)
                fill_normal(noise, weight.shape, tuple(offset), self.way.noise, f"{key}/noise")
                part.add_(noise)

    def _read(
        self, name: str, part: Tensor, offset: Sequence[int]
    ) -> Iterator[tuple[float, tuple[str, Tensor, Sequence[int]]]]:
        """The parts of dense tensors that `part` is made of, and the factor of each."""
        role = self.weights[name].role
        if not role.of_expert:
            factor = self.way.shared_factor if dense_name(name) != name else 1.0
            yield from [(factor, (dense_name(name), part, offset))] * (role not in BEGUN)
            return
        for expert, matrix in enumerate(part, offset[0]):
            row, column = offset[1:]
            first = self.way.shared + expert % self.way.slices * self.way.width
            place = (row, column + first) if role.into_stream else (row + first, column)
            yield self.way.factor, (dense_name(name), matrix, place)


def _multiplied(found: Weights, factor: float) -> Mapping[str, float]:
    """The factors of weights, with those of matrices `down` of feed-forwards multiplied."""
    downs = (name for name in found.index.tensors if name.endswith(".mlp.down.weight"))
    return {**found.factors, **{name: factor * found.factors.get(name, 1.0) for name in downs}}


class MergedReader(Reader):
    """The weights `found`: those of a `base`, with the products of an adapter's `factors` added; see `merged`.

    They are added in float32 or wider, and each product is made whole, so that every part of a matrix has the bits that
    it has in the whole. Beside a base in four bits, that is what they are added to, since it has computed so.
    """

    def __init__(self, found: Weights, base: Reader, merging: Merging) -> None:
        super().__init__(found.path, found.index, found.sizes, found.source, found.links, found.factors)
        self.base, self.adapter = base, reader_of(merging.factors)
        self.scale = adapter_of(merging.adapter).scale
        self.four_bits = {
            PREFIX + name
            for name, weight in weights(Config(model=found.model, adapter=merging.adapter).model).items()
            if weight.four_bits
        }
        self.product = lru_cache(maxsize=2)(self._product)

    def check(self, names: Iterable[str]) -> None:
        """Check nothing: positions of the base and of the factors are checked."""

    def fill_parts(self, parts: Iterable[tuple[str, Tensor, Sequence[int]]]) -> None:
        """Fill parts of tensors, each given by name, target, and its first element's place."""
        for name, part, offset in parts:
            adapted, factor = factor_names(name)[0] in self.adapter.index.tensors, self.factors.get(name, 1.0)
            if name in self.four_bits:
                wide = self._from_four_bits(name, part.shape, offset)
            elif not adapted and factor == 1:
                self.base.fill_parts([(name, part, offset)])
                continue
            else:
                wide = allocated(self.path, part.shape, self._wide(name))
                self.base.fill_parts([(name, wide, offset)])
            if adapted:
                box = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                wide += self.product(name)[box]
            part.copy_(wide if factor == 1 else wide.double() * factor)

    def _from_four_bits(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        """The part at `offset` of a weight as it is when it comes from four bits: read are the blocks that it is in."""
        first, end = offset[-1] // BLOCK_VALUES * BLOCK_VALUES, offset[-1] + shape[-1]
        end = -(-end // BLOCK_VALUES) * BLOCK_VALUES
        read = allocated(self.path, (*shape[:-1], end - first), torch.float32)
        self.base.fill_parts([(name, read, (*offset[:-1], first))])
        try:
            kept = dequantize_nf4(quantize_nf4(read), torch.float32)
        except ValueError as error:
            raise DamagedError(self.base.path, f"{name}: {error}") from None
        return kept[..., offset[-1] - first : offset[-1] - first + shape[-1]]

    def _wide(self, name: str) -> torch.dtype:
        there = getattr(torch, self.index.tensors[name].dtype)
        return torch.promote_types(there, torch.float32)

    def _product(self, name: str) -> Tensor:
        """The product of factors that the adapter adds to a tensor, as wide as it is merged."""
        shapes = {each: self.adapter.index.tensors[each].shape for each in factor_names(name)}
        pair = {each: allocated(self.path, shape, self._wide(name)) for each, shape in shapes.items()}
        self.adapter.fill(pair)
        first, second = pair.values()
        return (second @ first).mul_(self.scale)


def check_base(found: Weights) -> None:
    """Raises InputError if weights are those of an adapter that was trained beside another base. Reads all of it."""
    if found.merging is None or found.dense is None:
        return
    check_base(found.dense)
    factors = reader_of(found.merging.factors)
    if BASE in factors.index.tensors:
        expected = torch.empty((), dtype=torch.int64)
        factors.fill({BASE: expected})
        refuse_other_base(int(expected), _number(found.dense), f"{factors.path}", f"{found.path}")
    base = reader_of(found.dense)
    for name in (name for name in factors.index.tensors if name.startswith(COPY)):
        if not _same(factors, name, base, PREFIX + name.removeprefix(COPY)):
            rule = f"{name.removeprefix(COPY)} is another one than the adapter {factors.path} has beside its factors"
            raise InputError(f"{found.path}: {rule}; give the base with which it was trained")


def _same(copies: Reader, copy: str, base: Reader, name: str) -> bool:
    """Return whether a copy has the values of a tensor of the base, in its own data type."""
    stored, original = copies.index.tensors[copy], base.index.tensors[name]
    if stored.shape != original.shape:
        return False
    dtype = getattr(torch, stored.dtype)
    pair = [allocated(copies.path, stored.shape, dtype) for _ in (copy, name)]
    copies.fill({copy: pair[0]})
    base.fill({name: pair[1]})
    return pair[0].equal(pair[1])


def factors_of(found: Weights) -> Weights:
    """The factors of an adapter that `found` has merged. Raises InputError as `check_base` does."""
    assert found.merging is not None
    check_base(found)
    return found.merging.factors


def _number(found: Weights) -> int:
    """The number of a model, see `model.fingerprint`, some rows of which are read at a time."""
    total, reader = 0, reader_of(found)
    for name, stored in found.index.tensors.items():
        step = max(1, BLOCK * stored.shape[0] // max(stored.elements, 1))
        for first in range(0, stored.shape[0], step):
            rows = (min(step, stored.shape[0] - first), *stored.shape[1:])
            part, place = allocated(found.path, rows, torch.float32), (first, *[0] * (len(rows) - 1))
            reader.fill_parts([(name, part, place)])
            total += fingerprint(name.removeprefix(PREFIX), part, stored.shape, place)
    return total % MODULUS


def refuse_other_base(expected: int, found: int, adapter: str, base: str) -> None:
    """Raises InputError unless an adapter was trained beside a base of this number. expected: as an int64."""
    if expected % MODULUS != found % MODULUS:
        raise InputError(
            f"{base}: is not the model beside which the adapter {adapter} was trained, though it may have its sizes; "
            "give that one"
        )


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


def _part(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
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
