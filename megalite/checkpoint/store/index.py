"""The index of a checkpoint: where every tensor lies. It holds names and numbers, and nothing that could run.

`index.bin`, little-endian: u64 length of the header · the header, JSON: {"files": [name, …], "tensors": {name:
{"dtype": …, "shape": […], "chunks": count}, …}}, padded with blanks to 8 bytes · for every tensor, in that order, a
row of i64 per chunk: number of the file, position of the first byte, offsets in the tensor, sizes. The elements of a
chunk lie back to back, the last dimension fastest. Imports no torch.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from reprlib import repr as shortened
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.base.json_bounds import parse
from megalite.checkpoint.store.manifest import is_plain

MAX_INDEX_BYTES = 1 << 28  # bytes; the index of Llama 3.1 405B on 16,384 ranks has 168 MB
MAX_HEADER_BYTES = 1 << 24  # bytes of its header, of which that one has 0.8 MB
MAX_DIMENSIONS = 4  # dimensions of a tensor
MAX_ELEMENTS = 1 << 56  # elements of a tensor
MAX_NAME_LENGTH = 1000  # characters of a tensor's name
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}  # bytes of an element, of every type that a checkpoint may hold
LENGTH = struct.Struct("<Q")
Table = NDArray[np.int64]


@dataclass(frozen=True)
class Stored:
    """A tensor and where it lies in files. An empty tensor has no chunks."""

    dtype: str  # a name in torch
    shape: tuple[int, ...]
    rows: Table  # [chunks, 2 + 2 · dimensions]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def offsets(self) -> Table:
        return self.rows[:, 2 : 2 + len(self.shape)]

    @property
    def sizes(self) -> Table:
        return self.rows[:, 2 + len(self.shape) :]


class Chunk(NamedTuple):
    """A part of a tensor that lies in one file."""

    name: str  # name of the tensor
    dtype: str
    shape: Sequence[int]
    file: str
    position: int  # byte of the file at which the chunk begins
    offsets: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Index:
    files: tuple[str, ...]
    tensors: Mapping[str, Stored]

    @staticmethod
    def of(chunks: Iterable[Chunk]) -> "Index":
        """The index of `chunks`. Raises ValueError if they cannot be those of tensors in a checkpoint."""
        files: dict[str, int] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        rows: dict[str, list[list[int]]] = {}
        for chunk in chunks:
            kind = chunk.dtype, tuple(chunk.shape)
            if (known := kinds.setdefault(chunk.name, kind)) is kind:
                check_form(chunk.name, *kind)
            if known != kind or not len(chunk.offsets) == len(chunk.sizes) == len(chunk.shape):
                raise ValueError(f"has parts of {chunk.name} that do not belong together")
            found = rows.setdefault(chunk.name, [])
            if 0 not in chunk.sizes:
                number = files.setdefault(chunk.file, len(files))
                found.append([number, chunk.position, *chunk.offsets, *chunk.sizes])
        return Index(
            tuple(files),
            {
                name: Stored(dtype, shape, np.array(rows[name], np.int64).reshape(-1, 2 + 2 * len(shape)))
                for name, (dtype, shape) in kinds.items()
            },
        )

    def encode(self) -> bytes:
        described = {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": len(tensor.rows)}
            for name, tensor in self.tensors.items()
        }
        header = json.dumps({"files": self.files, "tensors": described}).encode()
        header += b" " * (-len(header) % 8)
        tables = (tensor.rows.astype("<i8").tobytes() for tensor in self.tensors.values())
        return b"".join([LENGTH.pack(len(header)), header, *tables])

    @staticmethod
    def decode(data: bytes) -> "Index":
        """The inverse of `encode`. Raises ValueError if `data` has another form; the rows are checked by `check`."""
        try:
            (length,) = LENGTH.unpack_from(data)
            position = LENGTH.size + length
            if length > MAX_HEADER_BYTES:
                raise ValueError
            header = parse(data[LENGTH.size : position])
            files, described = header["files"], header["tensors"]
            tensors = {}
            for name, fields in described.items():
                dtype, shape, chunks = _described(name, **fields)
                width = 2 + 2 * len(shape)
                rows = np.frombuffer(data[position : position + 8 * chunks * width], "<i8").reshape(chunks, width)
                position += rows.nbytes
                tensors[name] = Stored(dtype, shape, rows)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError("is no index") from None
        if position != len(data):
            raise ValueError(f"has {len(data)} bytes instead of {position}")
        if type(files) is not list or not all(type(name) is str and is_plain(name) for name in files):
            raise ValueError("names what is no file of a checkpoint")
        return Index(tuple(files), tensors)

    def check(self, sizes: Mapping[str, int], names: Iterable[str]) -> None:
        """Raises ValueError unless the chunks of the tensors `names` cover each exactly, and do not overlap in files.

        sizes: of the files of the checkpoint, in bytes.
        """
        limits = np.array([sizes.get(name, -1) for name in self.files], np.int64)
        taken = [np.empty((0, 3), np.int64)]
        for name in names:
            if (tensor := self.tensors.get(name)) is None:
                raise ValueError(f"lacks {name}")
            check_form(name, tensor.dtype, tensor.shape)
            files, starts = tensor.rows[:, 0], tensor.rows[:, 1]
            if not ((files >= 0) & (files < len(limits)) & (starts >= 0)).all():
                raise ValueError(f"places {name} outside of its files")
            if not _tiles(tensor):
                raise ValueError(f"does not cover {name} exactly")
            ends = starts + tensor.sizes.prod(axis=1) * ITEM_BYTES[tensor.dtype]
            if not ((starts <= ends) & (ends <= limits[files])).all():
                raise ValueError(f"places {name} outside of its files")
            taken.append(np.stack([files, starts, ends], axis=1))
        spans = np.concatenate(taken)
        spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
        if ((spans[1:, 0] == spans[:-1, 0]) & (spans[1:, 1] < spans[:-1, 2])).any():
            raise ValueError("gives the same bytes to two chunks")


def merged(parts: Iterable[Index]) -> Index:
    """Merge the indexes of the parts that several ranks have written, each into files of its own."""
    files: list[str] = []
    found: dict[str, list[Stored]] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            rows = tensor.rows.copy()
            rows[:, 0] += len(files)
            found.setdefault(name, []).append(replace(tensor, rows=rows))
        files += part.files
    return Index(
        tuple(files),
        {name: replace(some[0], rows=np.concatenate([one.rows for one in some])) for name, some in found.items()},
    )


def check_form(name: Any, dtype: Any, shape: Sequence[Any]) -> None:
    """Raises ValueError unless a checkpoint can hold a tensor of this name, dtype and shape."""
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(
            f"has a tensor named {shortened(name)}; names have at most {MAX_NAME_LENGTH} printable characters"
        )
    if dtype not in ITEM_BYTES:
        raise ValueError(f"has {name} of {shortened(dtype)}; known are {', '.join(ITEM_BYTES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"has {name} of {len(shape)} dimensions; tensors have at most {MAX_DIMENSIONS}")
    sizes_fit = all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape)
    if not sizes_fit or math.prod(size + 1 for size in shape) > MAX_ELEMENTS:
        raise ValueError(f"has {name} of the shape {shortened(shape)}, which no tensor has")


def _described(name: str, dtype: str, shape: list[int], chunks: int) -> tuple[str, tuple[int, ...], int]:
    """Raises ValueError or TypeError unless the header may say this of a tensor."""
    check_form(name, dtype, shape)
    if type(chunks) is not int or not 0 <= chunks <= MAX_INDEX_BYTES:
        raise ValueError
    return dtype, tuple(shape), chunks


def _tiles(tensor: Stored) -> bool:
    """Return whether chunks cover a tensor exactly: each element is in one of them.

    The number of chunks over a point, as a function of the point, jumps only at corners of chunks. So it is 1 inside of
    the tensor and 0 outside, if its jumps, signed and added up, are those of the tensor itself. Time grows as n log n.
    """
    shape, offsets, sizes = np.array(tensor.shape, np.int64), tensor.offsets, tensor.sizes
    if not ((offsets >= 0) & (sizes > 0) & (offsets < shape) & (sizes <= shape - offsets)).all():
        return False
    strides = np.array([math.prod(size + 1 for size in tensor.shape[dim + 1 :]) for dim in range(len(shape))], np.int64)
    corners: list[Any] = []
    signs: list[Any] = []
    for ends in product((0, 1), repeat=len(shape)):
        sign = 1 - 2 * (sum(ends) % 2)
        corners += [(offsets + sizes * ends) @ strides, [shape * ends @ strides]]
        signs += [np.full(len(sizes), sign), [-sign]]
    keys, numbers = np.unique(np.concatenate(corners), return_inverse=True)
    return not np.bincount(numbers, np.concatenate(signs), len(keys)).any()
