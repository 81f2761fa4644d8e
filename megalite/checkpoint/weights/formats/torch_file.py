"""Writes what `torch.save` would write, without holding the tensors: a ZIP archive of uncompressed records.

The pickle in it names the tensors of a nested dictionary; elements follow it, one record for each tensor.
"""

import io
import math
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from megalite.checkpoint.weights.formats.output import Put, Stream
from megalite.checkpoint.weights.maps.strips import Theirs

ALIGNMENT = 64  # bytes that the elements of a tensor are aligned to, so that they can be mapped into memory
PADDING_MARK = 0x4246  # marks the extra field of a record that is there for alignment, "FB" as in torch's own files
LOCAL_HEADER_BYTES = 30  # bytes of a record's header before its name
ZIP64_EXTRA_BYTES = 20  # bytes of the extra field with sizes above 4 GiB
STORAGES = {
    "float64": torch.DoubleStorage,
    "float32": torch.FloatStorage,
    "bfloat16": torch.BFloat16Storage,
    "float16": torch.HalfStorage,
    "int64": torch.LongStorage,
    "int32": torch.IntStorage,
    "uint8": torch.ByteStorage,
}


class Planned:
    """Stands in a dictionary for a tensor that is written later."""

    def __init__(self, theirs: Theirs, dtype: str) -> None:
        self.theirs, self.dtype = theirs, dtype


class _Storage:
    def __init__(self, dtype: str, key: str, elements: int) -> None:
        self.dtype, self.key, self.elements = dtype, key, elements


class _Pickler(pickle.Pickler):
    """Numbers the tensors as they come."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.planned: list[Planned] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Planned):
            return NotImplemented
        shape = value.theirs.shape
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        storage = _Storage(value.dtype, str(len(self.planned)), value.theirs.elements)
        self.planned.append(value)
        return torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return "storage", STORAGES[value.dtype], value.key, "cpu", value.elements


def write_torch(stream: Stream, content: Any, put: Put, folder: str = "archive") -> list[tuple[int, int]]:
    """Write `content`, in which tensors are `Planned`. Returns the position and the bytes of each one's elements."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    start, places = stream.tell(), []
    with zipfile.ZipFile(_Forward(stream), "w", zipfile.ZIP_STORED, allowZip64=True) as archive:  # type: ignore[call-overload]
        small: Sequence[tuple[str, bytes]] = [("data.pkl", buffer.getvalue()), ("byteorder", sys.byteorder.encode())]
        for name, data in small:
            archive.writestr(_info(f"{folder}/{name}", stream.tell() - start, len(data)), data)
        for number, planned in enumerate(pickler.planned):
            size = planned.theirs.bytes(planned.dtype)
            info = _info(f"{folder}/data/{number}", stream.tell() - start, size)
            with archive.open(info, "w", force_zip64=True) as record:
                places.append((stream.tell(), size))
                put(_Record(record), planned.theirs, planned.dtype)
        archive.writestr(_info(f"{folder}/version", stream.tell() - start, 2), b"3\n")
    return places


def _info(name: str, position: int, size: int) -> zipfile.ZipInfo:
    """The header of a record at `position`, padded so that the record's content is aligned."""
    info = zipfile.ZipInfo(name)
    info.file_size = size
    used = position + LOCAL_HEADER_BYTES + len(name) + 4 + ZIP64_EXTRA_BYTES
    padding = -used % ALIGNMENT
    info.extra = PADDING_MARK.to_bytes(2, "little") + padding.to_bytes(2, "little") + b"Z" * padding
    return info


class _Forward:
    """Passes on what is written. It has no `tell` on purpose: the archive counts positions from its own beginning."""

    def __init__(self, stream: Stream) -> None:
        self.write, self.flush = stream.write, stream.flush


class _Record:
    """A record of an archive, as a stream of its own."""

    def __init__(self, record: Any) -> None:
        self._record, self._bytes = record, 0

    def write(self, piece: Any) -> int:
        view = memoryview(piece).cast("B")
        self._record.write(view)
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        pass
