"""Where `torch.save` has put the elements of a tensor: its files are ZIP archives, whose records lie as they are."""

import io
import os
import struct
import zipfile
from typing import Any

LARGEST = 1 << 20  # bytes asked for at a time; the directory of an archive of one tensor has 463
RECORD = struct.Struct("<26xHH")  # a record's header, which ends in the lengths of its name and of what else follows


class Archive:
    """One tensor, saved into `length` bytes of the open file `descriptor` from `start`. Raises ValueError."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length
        try:
            with zipfile.ZipFile(_Section(descriptor, start, length)) as archive:
                self._records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise ValueError(f"is no tensor that torch has saved: {error}") from None

    def holds(self, name: str) -> bool:
        return name in self._records

    def read(self, name: str) -> bytes:
        """A small record."""
        position, size = self.place(name)
        if size > LARGEST:
            raise ValueError(f"has a record {name} of {size} bytes")
        return os.pread(self._descriptor, size, position)

    def place(self, name: str) -> tuple[int, int]:
        """Position in the file and size of a record that is not compressed."""
        record = self._records.get(name)
        if record is None or record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise ValueError(f"has no record {name} as it was in memory")
        header = self._start + record.header_offset
        lengths = RECORD.unpack(os.pread(self._descriptor, RECORD.size, header).ljust(RECORD.size))
        position = header + RECORD.size + sum(lengths)
        if not self._start <= header <= position <= self._start + self._length - record.file_size:
            raise ValueError(f"has a record {name} that does not lie in it")
        return position, record.file_size


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError  # as zipfile expects it
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        count = max(0, min(len(target), self._length - self._at))
        if count > LARGEST:
            raise ValueError(f"is no tensor that torch has saved: it has a directory of {count} bytes")
        count = os.preadv(self._descriptor, [memoryview(target)[:count]], self._start + self._at)
        self._at += count
        return count
