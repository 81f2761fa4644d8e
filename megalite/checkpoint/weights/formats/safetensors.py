"""Safetensors files: where their tensors lie, and writing them from front to back.

A file is a u64 with the length of the header, the header, JSON of names to dtype, shape and data_offsets, padded with
blanks to 8 bytes, and the elements, without gaps, in the order of the offsets. The library of that name holds all
tensors of a file in memory to write it; here, a file of any size is written in pieces. Imports no torch.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from megalite.base.errors import InputError, listing
from megalite.base.files import is_file
from megalite.base.json_bounds import parse
from megalite.checkpoint.store.disk import damage_of, opened, read_at, read_whole
from megalite.checkpoint.store.index import ITEM_BYTES, MAX_DIMENSIONS, Chunk, Index
from megalite.checkpoint.store.manifest import is_plain

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # which file each tensor of several is in
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000  # bytes of a header; the library reads no longer ones either
MAX_INDEX_BYTES = 1 << 26
DTYPES = {  # our names of theirs, in the order in which the library sorts the tensors of a file
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
DTYPE_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
METADATA = {"format": "pt"}  # transformers asks for it


@dataclass(frozen=True)
class Files:
    """The safetensors files of a folder."""

    index: Index
    sizes: Mapping[str, int]  # bytes of each file
    source: str  # the file that says which others there are


def header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[bytes, list[str]]:
    """The beginning of a file of `tensors`, dtype and shape by name, and the order in which their elements follow.

    Both are what the library writes, to the byte.
    """
    ranks = list(DTYPES.values())
    order = sorted(tensors, key=lambda name: (ranks.index(tensors[name][0]), name))
    fields: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH.size)
    return LENGTH.pack(len(text)) + text, order


def find(path: Path) -> Files:
    """The safetensors files of the folder `path`. Raises InputError if there are none, DamagedError for damage."""
    if is_file(path / INDEX):
        names, source = listed(path), INDEX
    elif is_file(path / ONE_FILE):
        names, source = {ONE_FILE: set()}, ONE_FILE
    else:
        more = "; convert its pytorch_model.bin to safetensors first" if is_file(path / "pytorch_model.bin") else ""
        raise InputError(f"{path}: has neither {ONE_FILE} nor {INDEX}{more}")
    return _opened(path, names, source)


def one_file(path: Path, name: str) -> Files:
    """The file `name` of a folder; raises as `find` does."""
    if not is_file(path / name):
        raise InputError(f"{path}: has no {name}")
    return _opened(path, {name: set()}, name)


def _opened(path: Path, names: Mapping[str, set[str]], source: str) -> Files:
    """The tensors of the files `names`; of each, those that the file `source` tells, or any."""
    chunks: list[Chunk] = []
    sizes: dict[str, int] = {}
    for name, wanted in names.items():
        with damage_of(path, name):
            found, sizes[name] = _header(path, name)
            if wanted and wanted != {chunk.name for chunk in found}:
                odd = sorted(wanted ^ {chunk.name for chunk in found})
                raise ValueError(f"has other tensors than {INDEX} tells, {listing(odd[:3], 'and')} for example")
            chunks += found
    with damage_of(path, source):
        return Files(Index.of(chunks), sizes, source)


def listed(path: Path) -> dict[str, set[str]]:
    """The files that the index names, each with its tensors."""
    with damage_of(path, INDEX):
        try:
            places = parse(read_whole(path, INDEX, MAX_INDEX_BYTES, links=True), unique=True)["weight_map"]
            found: dict[str, set[str]] = {}
            for name, file in places.items():
                if not isinstance(file, str) or not is_plain(file):
                    raise ValueError(f"places {shortened(name)} in {shortened(file)}, which is no file of this folder")
                found.setdefault(file, set()).add(name)
        except (KeyError, TypeError, AttributeError):
            raise ValueError("has no weight_map of names to files") from None
        if not found:
            raise ValueError("names no files")
        return found


def _header(path: Path, name: str) -> tuple[list[Chunk], int]:
    """Read where the tensors of a file lie, and its size. Raises ValueError where the header is not as it must be."""
    with opened(path, name, links=True) as descriptor:
        size = os.fstat(descriptor).st_size
        if size < LENGTH.size:
            raise ValueError(f"has {size} bytes, too few for safetensors")
        (length,) = LENGTH.unpack(os.pread(descriptor, LENGTH.size, 0))
        if length > min(MAX_HEADER_BYTES, size - LENGTH.size):
            raise ValueError(f"has a header of {length:,} bytes, more than the file or the format has")
        text = bytearray(length)
        read_at(path, name, descriptor, memoryview(text), LENGTH.size)
    header = parse(bytes(text), unique=True)
    if not isinstance(header, dict):
        raise ValueError("has no header of safetensors")
    header.pop("__metadata__", None)
    start = LENGTH.size + length
    chunks = [_chunk(name, start, key, fields) for key, fields in header.items()]
    end = start
    for chunk in sorted(chunks, key=lambda chunk: (chunk.position, math.prod(chunk.shape))):
        if chunk.position != end:
            raise ValueError(f"has a gap or an overlap before {shortened(chunk.name)}")
        end += math.prod(chunk.shape) * ITEM_BYTES[chunk.dtype]
    if end != size:
        raise ValueError(f"has {size:,} bytes instead of {end:,}: it was cut or is still being written")
    return chunks, size


def _chunk(file: str, start: int, name: str, fields: Any) -> Chunk:
    try:
        dtype, shape, (first, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, first, end]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"describes {shortened(name)} in another way than safetensors") from None
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"has {shortened(name)} of {len(shape):,} dimensions; tensors have at most {MAX_DIMENSIONS}")
    if not all(type(number) is int and 0 <= number < 1 << 56 for number in numbers):
        raise ValueError(f"has sizes of {shortened(name)} that no tensor has")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"has {shortened(name)} of {shortened(dtype)}; known are {', '.join(DTYPES)}; "
            "a quantized model must be turned into one of these first"
        )
    chunk = Chunk(name, DTYPES[dtype], shape, file, start + first, [0] * len(shape), shape)
    if end - first != math.prod(shape) * ITEM_BYTES[DTYPES[dtype]]:
        raise ValueError(f"has {end - first} bytes of {shortened(name)} {dtype} {shortened(shape)}")
    return chunk
