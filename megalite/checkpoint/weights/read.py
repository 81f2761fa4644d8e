"""Readers of weights of any kind: as they lie in files, upcycled, or with an adapter merged into them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.weights.formats.opened import COPY, Merging, Weights
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.maps.upcycled import BEGUN, Upcycling, dense_name
from megalite.checkpoint.weights.merged import BASE
from megalite.checkpoint.weights.reader import BLOCK, Reader, allocated
from megalite.config.layers import adapter_of
from megalite.config.schema import Config
from megalite.model.fingerprint import MODULUS, fingerprint
from megalite.model.init import fill_normal
from megalite.plan.model.parametrization import standard_deviation
from megalite.plan.model.weights import weights
from megalite.plan.parts.adapted import MAGNITUDE, factor_names, magnitude_name
from megalite.plan.parts.roles import ROUTER
from megalite_kernels.nf4 import BLOCK as BLOCK_VALUES
from megalite_kernels.nf4 import dequantize_nf4, quantize_nf4


def reader_of(found: Weights) -> Reader:
    """Make a reader of weights of any format and check all positions. Raises DamagedError if one is impossible."""
    if found.dense is not None and found.upcycling is not None:
        return UpcycledReader(found, found.dense, found.upcycling)
    if found.dense is not None and found.merging is not None:
        return MergedReader(found, reader_of(found.dense), found.merging)
    reader = Reader(
        found.path, found.index, found.sizes, found.source, found.links, found.factors, found.woven, found.shared
    )
    if found.norms is not None:
        reader = NormedReader(reader, *found.norms)
    reader.check(found.index.tensors)
    return reader


class UpcycledReader(Reader):
    """Reads `found`, a model with experts, from the weights of a `dense` one; see `maps.upcycled`."""

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
        self.product, self.scales = lru_cache(maxsize=2)(self._product), lru_cache(maxsize=2)(self._scales)

    def check(self, names: Iterable[str]) -> None:
        """Check nothing: positions of the base and of the factors are checked."""

    def fill_parts(self, parts: Iterable[tuple[str, Tensor, Sequence[int]]]) -> None:
        """Fill parts of tensors, each given by name, target, and its first element's place."""
        for name, part, offset in parts:
            adapted, factor = factor_names(name)[0] in self.adapter.index.tensors, self.factors.get(name, 1.0)
            if not adapted and factor == 1 and name not in self.four_bits:
                self.base.fill_parts([(name, part, offset)])
                continue
            wide = self._of_base(name, part.shape, offset)
            if adapted:
                box = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                wide += self.product(name)[box]
                if magnitude_name(name) in self.adapter.index.tensors:
                    wide *= self.scales(name)[box[0], None]
            part.copy_(wide if factor == 1 else wide.double() * factor)

    def _of_base(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        """The part at `offset` of a weight of the base, as wide as it is merged."""
        if name in self.four_bits:
            return self._from_four_bits(name, shape, offset)
        wide = allocated(self.path, shape, self._wide(name))
        self.base.fill_parts([(name, wide, offset)])
        return wide

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

    def _scales(self, name: str) -> Tensor:
        """The factors by which rows of W + scale · B A have the norms that the adapter has trained."""
        shape = self.index.tensors[name].shape
        base = self._of_base(name, shape, (0,) * len(shape))
        added = allocated(self.path, shape[:1], base.dtype)
        self.adapter.fill({magnitude_name(name): added})
        norms = row_norms(base) + added
        return norms.div_(row_norms(base.add_(self.product(name))).clamp_(min=torch.finfo(base.dtype).tiny))


class NormedReader(Reader):
    """Tensors of an adapter as `reader` has them, with norms of a base's rows added to magnitudes, so many `times`."""

    def __init__(self, reader: Reader, times: int, base: Weights) -> None:
        super().__init__(**vars(reader))
        self.times, self.base = times, reader_of(base)

    def fill_parts(self, parts: Iterable[tuple[str, Tensor, Sequence[int]]]) -> None:
        """Fill parts of tensors, each given by name, target, and its first element's place."""
        for name, part, offset in parts:
            if not name.endswith(MAGNITUDE):
                super().fill_parts([(name, part, offset)])
                continue
            wide = allocated(self.path, part.shape, torch.float64)
            super().fill_parts([(name, wide, offset)])
            weight = f"{name.removesuffix(MAGNITUDE)}.weight"
            inputs = self.base.index.tensors[weight].shape[1]
            for place, norms in enumerate(wide.split(step := max(1, BLOCK // inputs))):
                rows = allocated(self.path, (len(norms), inputs), torch.float64)
                self.base.fill_parts([(weight, rows, (offset[0] + place * step, 0))])
                norms.add_(row_norms(rows), alpha=self.times)
            part.copy_(wide)


def row_norms(matrix: Tensor) -> Tensor:
    """The norms of the rows of a matrix, `[out]`."""
    return torch.linalg.vector_norm(matrix, dim=-1, dtype=torch.float64).to(matrix.dtype)


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
    """Trained tensors of the adapter that `found` has merged, with norms of rows as PEFT's files have them.

    Raises InputError as `check_base` does.
    """
    assert found.merging is not None
    assert found.dense is not None
    check_base(found)
    factors = found.merging.factors
    if not found.merging.adapter.dora:
        return factors
    # PEFT's files have them already.
    return replace(factors, norms=None if factors.norms else (1, found.dense))


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
