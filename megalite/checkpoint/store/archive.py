"""Finds the elements of a tensor that `torch.save` has written: its files are ZIP archives of uncompressed records."""

import io
import os
import struct
import zipfile

MAX_READ_BYTES = (
    1 << 20
)  # bytes asked for at a time, unless told otherwise; the directory of an archive of one tensor has 463
RECORD = struct.Struct("<4s22xHH")  # a record's header: its mark, and the lengths of its name and of what else follows
MARK = b"PK\3\4"
ENCRYPTION_FLAG = 1  # a bit of a record's flags
REFUSALS = (zipfile.BadZipFile, NotImplementedError, OverflowError, OSError, UnicodeDecodeError, struct.error)


class Archive:
    """Records that torch has saved into `length` bytes of the open file `descriptor` from `start`. Raises ValueError.

    largest: bytes of a record that is read, and of the directory of records, at most.
    """

    def __init__(self, descriptor: int, start: int, length: int, largest: int = MAX_READ_BYTES) -> None:
        self._descriptor, self._start, self._end, self._largest = descriptor, start, start + length, largest
        if self._end > os.fstat(descriptor).st_size:
            raise ValueError(f"ends before the {length} bytes from {start} that should hold a tensor")
        try:
            with zipfile.ZipFile(_Section(descriptor, start, length, largest)) as archive:
                records = archive.infolist()
        except REFUSALS as error:
            raise ValueError(f"is no tensor that torch has saved: {error}") from None
        self._records = {record.filename.partition("/")[2]: record for record in records}
        if len(self._records) < len(records):
            raise ValueError("has two records of one name")

    def holds(self, name: str) -> bool:
        return name in self._records

    def read(self, name: str) -> bytes:
        """The content of a small record."""
        position, size = self.locate(name)
        if size > self._largest:
            raise ValueError(f"has a record {name} of {size} bytes")
        return os.pread(self._descriptor, size, position)

    def locate(self, name: str) -> tuple[int, int]:
        """The position in the file and the size of a record that is not compressed."""
        record = self._records.get(name)
        if (
            record is None
            or record.compress_type != zipfile.ZIP_STORED
            or record.compress_size != record.file_size
            or record.flag_bits & ENCRYPTION_FLAG
        ):
            raise ValueError(f"has no record {name} as it was in memory")
        header = self._start + record.header_offset
        if self._start <= header <= self._end - RECORD.size:
            mark, *lengths = RECORD.unpack(os.pread(self._descriptor, RECORD.size, header))
            position = header + RECORD.size + sum(lengths)
            if mark == MARK and position <= self._end - record.file_size:
                return position, record.file_size
        raise ValueError(f"has a record {name} that does not lie in it")


class _Section(io.RawIOBase):
    """A part of a file, to be read as a file of its own, little at a time."""

    def __init__(self, descriptor: int, start: int, length: int, largest: int) -> None:
        self._descriptor, self._start, self._length, self._largest, self._at = descriptor, start, length, largest, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError("it refers to what is before its beginning")  # as zipfile expects it
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read at most `size` bytes, never more than are left: a damaged file may state any size. Raises ValueError."""
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if count > self._largest:
            raise ValueError(f"is no tensor that torch has saved: it has a directory of {count} bytes")
        content = os.pread(self._descriptor, count, self._start + self._at)
        self._at += len(content)
        return content
