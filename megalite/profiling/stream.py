"""A long JSON text, read so that memory holds one value at a time."""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator
from gzip import GzipFile
from typing import Any

CHUNK = 1 << 20  # bytes that are read at once
MAX_VALUE = 4 << 20  # characters of a value; one of so many empty lists takes 150 MB of memory
MAX_BYTES = 1 << 30  # bytes of the whole text
SPACE = re.compile(r"[ \t\n\r]*")
AFTER = " \t\n\r:,]}"  # characters that may follow a value
DECODER = json.JSONDecoder(strict=False)


class Stream:
    """JSON text of which memory holds a piece. All methods raise ValueError for other text, and RecursionError."""

    def __init__(self, file: GzipFile) -> None:
        # PyTorch 2.11 at times writes bytes into names that JSON and UTF-8 do not allow.
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._at, self._size = "", 0, 0

    def members(self, kept: Collection[str], listed: str, each: Callable[[Any], None]) -> dict[str, Any]:
        """Read the text, an object, to its end: call `each` with the items of the list `listed`.

        Returns the members `kept`, and None by the name `listed` if that is there.
        """
        found: dict[str, Any] = {}
        for _ in self._parts("{", "}"):
            key = self._value()
            self._take(":")
            if key in found:
                raise ValueError(f"has {key!r:.50} twice")
            if key == listed:
                found[key] = None
                for _ in self._parts("[", "]"):
                    each(self._value())
            elif key in kept:
                found[key] = self._value()
            else:
                self._value()
        if self._next():
            raise ValueError("goes on after its end")
        return found

    def _parts(self, begin: str, end: str) -> Iterator[None]:
        """Take the brackets and commas of an object or a list. The caller takes each part when it is yielded."""
        self._take(begin)
        if self._next() == end:
            self._take(end)
            return
        yield
        while self._take("," + end) == ",":
            yield

    def _take(self, wanted: str) -> str:
        """Take the next character, which must be one of those wanted."""
        if not (found := self._next()) or found not in wanted:
            raise ValueError(f"has {found!r} in place of {' or '.join(wanted)}" if found else "ends too early")
        self._at += 1
        return found

    def _next(self) -> str:
        """The next character but space, which is not taken; empty at the end."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self._at)
                after = self._text[end : end + 1]
                if after and after in AFTER:  # else a number may go on
                    self._at = end
                    return found
                told = f"has {after!r} after a value" if after else "ends too early"
            except json.JSONDecodeError as error:
                told = f"is no JSON: {error.msg}"
            if not self._more():
                raise ValueError(told)

    def _more(self) -> bool:
        """Read on, and forget what was taken. Returns whether there was more."""
        rest = self._text[self._at :]
        if len(rest) > MAX_VALUE:
            raise ValueError(f"has a value of more than {MAX_VALUE:,} characters")
        piece = self._file.read(max(CHUNK, len(rest)))
        self._size += len(piece)
        if self._size > MAX_BYTES:
            raise ValueError(f"is longer than {MAX_BYTES:,} bytes")
        self._text, self._at = rest + self._decoder.decode(piece, final=not piece), 0
        return bool(piece)
