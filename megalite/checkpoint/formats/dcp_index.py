"""Makes an index of any folder that PyTorch Distributed Checkpoint (DCP) has written, without running its pickles.

DCP's own index is a pickle, and `torch.save` wraps every tensor in one. Both are read as data only. Every part of a
tensor is looked up in its file, so that our index describes what is really there.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

from megalite.checkpoint.archive import Archive
from megalite.checkpoint.disk import damage_of, opened, read_whole
from megalite.checkpoint.files import METADATA
from megalite.checkpoint.index import ITEM_BYTES, Chunk, Index, check_form
from megalite.checkpoint.manifest import INDEX, MANIFEST, is_plain
from megalite.checkpoint.formats.inert_pickle import Made, Named, read_pickle

LIMIT = 1 << 28  # bytes of DCP's index
RESERVED = (METADATA, INDEX, MANIFEST)  # files that hold no tensor
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


class Part(NamedTuple):
    """A part of a tensor, as described by DCP's index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # of the bytes that torch.save wrote
    length: int


def dcp_index(path: Path) -> tuple[Index, list[str]]:
    """The index of the tensors in the folder `path`, and the names of entries that are no tensors.

    Raises DamagedError if a file is not as DCP writes it, or has elements in another order.
    """
    with _told(path, METADATA):
        fields = _state(read_pickle(read_whole(path, METADATA, LIMIT)), "metadata.Metadata")
        entries, locations = _dict(fields["state_dict_metadata"]), dict(_locations(_dict(fields["storage_data"])))
        tensors = {name: entry for name, entry in entries.items() if not _is(entry, "metadata.BytesStorageMetadata")}
        parts = [part for name, entry in tensors.items() for part in _parts(name, entry, locations)]
    with damage_of(path, METADATA):
        index = Index.of(_chunks(path, parts))
    return index, [shortened(name) for name in entries if name not in tensors]


def _locations(storage_data: dict[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The location of every part, with its `_key`."""
    for key, location in storage_data.items():
        found = _state(key, "metadata.MetadataIndex")
        if found.get("offset") is not None:  # otherwise it is no tensor
            yield _key(_text(found["fqn"]), _sizes(found["offset"])), _state(location, "filesystem._StorageInfo")


def _key(name: str, offsets: tuple[int, ...]) -> str:
    """The key of a part. It is a string, as tuples of numbers could be chosen to have equal hashes."""
    return f"{name} {offsets}"


def _parts(name: Any, entry: Any, locations: dict[str, dict[str, Any]]) -> Iterator[Part]:
    """The parts of a tensor, each taken from `locations`."""
    fields = _state(entry, "metadata.TensorStorageMetadata")
    properties, shape = fields["properties"], _sizes(fields["size"])
    if not _is(properties, "metadata.TensorProperties") or not isinstance(properties.state, tuple):
        raise ValueError(f"has no properties of {shortened(name)}")
    dtype = properties.state[0].name.removeprefix("torch.")
    check_form(name, dtype, shape)
    for chunk in fields["chunks"]:
        at = _state(chunk, "metadata.ChunkStorageMetadata")
        offsets, sizes = _sizes(at["offsets"]), _sizes(at["sizes"])
        location = locations.pop(_key(name, offsets))
        if location.get("transform_descriptors"):
            raise ValueError(f"has {name} transformed, compressed for example")
        file, start, length = _text(location["relative_path"]), *_sizes((location["offset"], location["length"]))
        if not is_plain(file) or file.lower() in RESERVED:
            raise ValueError(f"places {name} in {shortened(file)}, which is no file of tensors in its folder")
        yield Part(name, dtype, shape, offsets, sizes, file, start, length)


def _chunks(path: Path, parts: Iterable[Part]) -> Iterator[Chunk]:
    """The positions of the elements of `parts`, looked up in the files themselves."""
    for file, group in groupby(sorted(parts, key=attrgetter("file", "start")), attrgetter("file")):
        with opened(path, file) as descriptor, _told(path, file):
            end = 0
            for part in group:
                if part.start < end:
                    raise ValueError(f"has {part.name} in bytes of another part, as {METADATA} tells")
                end = part.start + part.length
                position = 0 if 0 in part.sizes else _position(descriptor, part)
                yield Chunk(part.name, part.dtype, part.shape, file, position, part.offsets, part.sizes)


def _position(descriptor: int, part: Part) -> int:
    """The position of a part's first element. Raises ValueError unless all follow it, the last dimension fastest."""
    archive = Archive(descriptor, part.start, part.length)
    match read_pickle(archive.read("data.pkl")):
        case Made(
            "torch._utils._rebuild_tensor_v2",
            (Made("persistent", ((_, Named(kind), str(record), *_),)), offset, sizes, strides, *_),
        ):
            (first,), sizes, strides = _sizes((offset,)), _sizes(sizes), _sizes(strides)
        case _:
            raise ValueError(f"holds no tensor where {part.name} should be")
    if (STORAGES.get(kind.removeprefix("torch.")), sizes) != (part.dtype, part.sizes):
        raise ValueError(f"holds another dtype or shape of {part.name} than {METADATA} tells")
    rows = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    if len(strides) != len(rows) or any(size > 1 and a != b for size, a, b in zip(sizes, strides, rows, strict=True)):
        raise ValueError(f"holds {part.name} in another order of elements")
    if archive.holds("byteorder") and archive.read("byteorder") != sys.byteorder.encode():
        raise ValueError(f"holds {part.name} in another order of bytes than this machine's")
    position, size = archive.locate(f"data/{record}")
    if (first + math.prod(sizes)) * ITEM_BYTES[part.dtype] > size:
        raise ValueError(f"holds only a part of {part.name}")
    return position + first * ITEM_BYTES[part.dtype]


@contextmanager
def _told(path: Path, file: str) -> Iterator[None]:
    """Turns errors about data that is not as DCP writes it into DamagedError."""
    with damage_of(path, file):
        try:
            yield
        except (TypeError, KeyError, AttributeError, IndexError):
            raise ValueError("is not as DCP writes it") from None
        except MemoryError:
            raise ValueError("takes more memory than there is") from None


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.name == f"torch.distributed.checkpoint.{name}"


def _state(value: Any, name: str) -> dict[str, Any]:
    if not _is(value, name):
        raise ValueError(f"has something else in place of {name}")
    return _dict(value.state)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("has something else in place of a dictionary")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("has something else in place of a name")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """The whole numbers of a torch.Size or of a tuple. Raises ValueError for anything else."""
    numbers = value.arguments[0] if isinstance(value, Made) and value.name == "torch.Size" else value
    if not isinstance(numbers, tuple) or not all(type(number) is int and 0 <= number < 1 << 56 for number in numbers):
        raise ValueError("has something else in place of sizes")
    return numbers
