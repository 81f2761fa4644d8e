"""Reads files of lines that are still being written to: each line once, and no half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Optional

from .files import opened

CHUNK_BYTES = 2**20  # bytes that are read at a time
MAX_LINE_BYTES = 2**20  # a longer one is passed over
MAX_FILE_BYTES = 2**32  # no line of a larger file is read: no run tells as much
MAX_NUMBER = 1e15  # numbers of this size, or above, are not believed


class Tail:
    """The whole lines of a file that were not there before.

    must_open: whether a file that is there and cannot be opened is an error, and not one without lines.
    """

    def __init__(self, path: Path, must_open: bool = False) -> None:
        self.path, self._must_open = path, must_open
        self._file: Optional[tuple[int, int]] = None
        self._at = 0  # bytes that were read, all of them whole lines
        self._skipping = False  # inside of a line that is too long

    def replaced(self) -> bool:
        """Return whether there is another file, or a shorter one, so that everything has to be read anew."""
        try:
            found = self.path.stat()
        except OSError:
            return self._file is not None
        return self._file is not None and ((found.st_dev, found.st_ino) != self._file or found.st_size < self._at)

    def lines(self) -> Iterator[bytes]:
        """The lines that have come. Nothing for a file that is not there, or that is none. Raises OSError."""
        try:
            file = open(opened(self.path, os.O_RDONLY), "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            if self._must_open and not isinstance(error, FileNotFoundError):
                raise
            return
        with file:
            found = os.fstat(file.fileno())
            self._file = (found.st_dev, found.st_ino)
            if found.st_size > MAX_FILE_BYTES:
                return
            file.seek(self._at)
            yield from self._new(file)

    def _new(self, file: BinaryIO) -> Iterator[bytes]:
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                self._at += len(line) + 1
                if self._skipping:
                    self._skipping = False
                elif len(line) <= MAX_LINE_BYTES:
                    yield line
            if len(rest) > MAX_LINE_BYTES:
                self._at += len(rest)
                self._skipping, rest = True, b""


def parsed(line: bytes) -> Optional[dict[str, Any]]:
    """The object that a line holds, with what is no UTF-8 replaced; None if it holds none."""
    try:
        found = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def number(value: object) -> Optional[float]:
    """A number that can be reckoned with; None if it is none."""
    return float(value) if type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER else None  # type: ignore[operator, arg-type]


def whole(value: object) -> Optional[int]:
    """A whole number from 0 on; None if it is none."""
    return value if type(value) is int and 0 <= value < MAX_NUMBER else None
