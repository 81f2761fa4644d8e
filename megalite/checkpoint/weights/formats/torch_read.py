"""Reads what `torch.save` has written, without running its pickle: plain values, and where the tensors lie.

Imports no torch.
"""

import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalite.checkpoint.store.archive import Archive
from megalite.checkpoint.store.disk import damage_of, opened
from megalite.checkpoint.store.index import ITEM_BYTES, Chunk, check_form
from megalite.checkpoint.weights.formats.inert_pickle import Made, Named, read_pickle

MAX_PICKLE_BYTES = 1 << 26  # bytes of a file's pickle, and of its directory of records
ZIP = b"PK"  # begins a file of torch 1.6 or later
PARAMETER = "torch._utils._rebuild_parameter"
NUMBERS = {"float32": "=f", "float64": "=d", "int32": "=i", "int64": "=q"}  # how struct reads them
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class Saved:
    """A file that `torch.save` has written. Raises DamagedError.

    content: what was saved. Tensors in it are records of the calls that would have made them; see `is_tensor`.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        with opened(path, name, links=True) as descriptor, torch_damage(path, name):
            self.bytes = os.fstat(descriptor).st_size
            if os.pread(descriptor, len(ZIP), 0) != ZIP:
                raise ValueError("is no file of torch 1.6 or later; load it with torch, and save it again")
            archive = Archive(descriptor, 0, self.bytes, MAX_PICKLE_BYTES)
            self.content = read_pickle(archive.read("data.pkl"))

    def chunks(self, tensors: Mapping[str, Any]) -> list[Chunk]:
        """The tensors of `content` that are given by name, as parts of this file."""
        with opened(self.path, self.name, links=True) as descriptor, torch_damage(self.path, self.name):
            archive, found = Archive(descriptor, 0, self.bytes, MAX_PICKLE_BYTES), []
            for name, value in tensors.items():
                dtype, shape, position = located(archive, value, name)
                found.append(Chunk(name, dtype, shape, self.name, position, (0,) * len(shape), shape))
            return found

    def whole(self, value: Any) -> int | None:
        """The whole number that a value in `content` is, or that is the only element of a tensor; None of others."""
        if type(value) is int:
            return value
        if not is_tensor(value):
            return None
        (chunk,) = self.chunks({"a number": value})
        if chunk.dtype not in NUMBERS or math.prod(chunk.shape) != 1:
            return None
        with opened(self.path, self.name, links=True) as descriptor:
            content = os.pread(descriptor, ITEM_BYTES[chunk.dtype], chunk.position)
        (number,) = struct.unpack(NUMBERS[chunk.dtype], content)
        return int(number) if math.isfinite(number) and number == int(number) else None


def is_tensor(value: Any) -> bool:
    """Return whether a value in a file stands for a tensor."""
    return isinstance(value, Made) and value.name in (PARAMETER, "torch._utils._rebuild_tensor_v2")


def located(archive: Archive, value: Any, name: str) -> tuple[str, tuple[int, ...], int]:
    """Dtype and shape of a tensor, and the position of its first element.

    Raises ValueError unless all elements follow, the last dimension fastest.
    """
    if isinstance(value, Made) and value.name == PARAMETER and value.arguments:
        value = value.arguments[0]
    match value:
        case Made(
            "torch._utils._rebuild_tensor_v2",
            (Made("persistent", ((_, Named(kind), str(record), *_),)), offset, shape, strides, *_),
        ):
            (first,), shape, strides = sizes((offset,)), sizes(shape), sizes(strides)
        case _:
            raise ValueError(f"holds no tensor where {name} should be")
    dtype = STORAGES.get(kind.removeprefix("torch."), kind)
    check_form(name, dtype, shape)
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if len(strides) != len(rows) or any(size > 1 and a != b for size, a, b in zip(shape, strides, rows, strict=True)):
        raise ValueError(f"holds {name} in another order of elements")
    if archive.holds("byteorder") and archive.read("byteorder") != sys.byteorder.encode():
        raise ValueError(f"holds {name} in another order of bytes than this machine's")
    position, size = archive.locate(f"data/{record}")
    if (first + math.prod(shape)) * ITEM_BYTES[dtype] > size:
        raise ValueError(f"holds only a part of {name}")
    return dtype, shape, position + first * ITEM_BYTES[dtype]


@contextmanager
def torch_damage(path: Path, file: str) -> Iterator[None]:
    """Turn errors about data that is not as torch writes it into DamagedError."""
    with damage_of(path, file):
        try:
            yield
        except (TypeError, KeyError, AttributeError, IndexError):
            raise ValueError("is not as torch writes it") from None
        except MemoryError:
            raise ValueError("takes more memory than there is") from None


def dictionary(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("has something else in place of a dictionary")
    return value


def sizes(value: Any) -> tuple[int, ...]:
    """The whole numbers of a torch.Size or of a tuple. Raises ValueError for anything else."""
    numbers = value.arguments[0] if isinstance(value, Made) and value.name == "torch.Size" else value
    if not isinstance(numbers, tuple) or not all(type(number) is int and 0 <= number < 1 << 56 for number in numbers):
        raise ValueError("has something else in place of sizes")
    return numbers
