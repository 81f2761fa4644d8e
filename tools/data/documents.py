"""Documents from text, JSON Lines and Parquet files, plain or compressed."""

import codecs
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megalite.base.errors import InputError
from megalite_tools.data.opened import Format, format_of, open_utf8

try:
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet
except ImportError:  # optional: pip install megalite[data]
    pyarrow = None

PARQUET_ROWS = 64  # rows decoded at a time
TEXT_TYPES = ("is_null", "is_string", "is_large_string", "is_binary", "is_large_binary", "is_fixed_size_binary")
BLOCK = 1 << 20  # bytes of text read at a time
MAX_DOCUMENT_BYTES = 256 << 20  # bytes of a document, by default

DEFAULT_KEY = "text"
EMPTY_DOCUMENT = "empty document"
UNREADABLE_FILE = "unreadable file"


@dataclass(frozen=True)
class Reading:
    """Settings for reading documents."""

    key: str = DEFAULT_KEY  # the JSON field or Parquet column with the text; dots lead into nested ones
    format: Format | None = None  # None: as the suffix says
    encoding: str = "utf-8"  # encoding of text and JSON Lines
    separator: str | None = None  # between the documents of a text file; None: the file is one
    most: int = MAX_DOCUMENT_BYTES  # bytes of a document
    # Makes a document of an object, given its place first; None: the document is the field `key`.
    make: "Callable[[str, dict[str, Any]], Document | Reject] | None" = None


@dataclass(frozen=True)
class Document:
    text: str


@dataclass(frozen=True)
class Reject:
    """A document that cannot be used: its place, the kind of problem, and details."""

    origin: str  # FILE, FILE:LINE or FILE:ROW
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        detail = " ".join(self.detail.split())  # messages of packages may have several lines
        return f"{self.origin}: {self.reason}" + (f": {detail}" if detail else "")


def read_documents(
    path: Path, reading: Reading, advanced: Callable[[int], None] = lambda _: None
) -> Iterator[Document | Reject]:
    """Every document of one file; `advanced` is called with the number of bytes read from it.

    A document is a JSON object on a line, a row of Parquet, a text file, or the text between separators in one. Memory
    holds one document of at most `reading.most` bytes, or 64 rows. Data that cannot be used gives a Reject. Raises
    InputError for an unknown format, compressed Parquet or a missing optional package.
    """
    form = format_of(path, reading.format)
    try:
        if form == "parquet":
            yield from _parquet(path, reading, advanced)
        else:
            with open_utf8(path, reading.encoding, advanced) as file:
                yield from _json_lines(path, file, reading) if form == "jsonl" else _text(path, file, reading)
    except UnicodeError as error:
        yield Reject(str(path), f"not valid {reading.encoding}", str(error)[:200])
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        yield Reject(str(path), UNREADABLE_FILE, str(error))


@dataclass
class Skipped:
    """Counts the documents left out so far, by reason, and keeps the first of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, Reject] = field(default_factory=dict)

    def add(self, reject: Reject) -> None:
        self.counts[reject.reason] += 1
        self.first.setdefault(reject.reason, reject)

    def nothing_kept(self, inputs: Sequence[object]) -> str:
        """The message for the case that `inputs` have no usable document."""
        empty = f"{inputs[0]} is empty" + (f", and so are {len(inputs) - 1:,} more" if len(inputs) > 1 else "")
        return "no usable document in the input: " + ("; ".join(self.lines()) or empty)

    def lines(self) -> list[str]:
        """One line for each reason."""
        return [f"{count:,} × {reason}, first {self.first[reason].origin}" for reason, count in self.counts.items()]


def refuse(reject: Reject, on_error: Literal["stop", "skip"], skipped: Skipped) -> None:
    """Add a document to those left out. Raises InputError if `on_error` is "stop"."""
    if on_error == "stop":
        raise InputError(f"{reject}; --on-error skip leaves such out")
    skipped.add(reject)


def _text(path: Path, file: io.BufferedIOBase, reading: Reading) -> Iterator[Document | Reject]:
    whole = reading.separator is None
    for number, raw in enumerate(_between(file, (reading.separator or "").encode(), reading.most), 1):
        origin = str(path) if whole else f"{path}:{number}"
        if raw is None:
            yield _too_long(origin, reading)
            continue
        if reading.separator == "\n":
            raw = raw.removesuffix(b"\r")
        try:
            yield _checked(origin, raw.decode(), reading)
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            yield Reject(f"{path}:{line}" if whole else origin, "not valid UTF-8", f"byte 0x{raw[error.start]:02x}")


def _json_lines(path: Path, file: io.BufferedIOBase, reading: Reading) -> Iterator[Document | Reject]:
    for number, line in enumerate(_between(file, b"\n", reading.most), 1):
        if line is None:
            yield _too_long(f"{path}:{number}", reading)
        elif line and not line.isspace():
            yield _json_document(f"{path}:{number}", line, reading)


def _between(file: io.BufferedIOBase, separator: bytes, most: int) -> Iterator[bytes | None]:
    """Yields each text between separators, or None if it has over `most` bytes. Without separator, the whole file.

    A byte order mark at the beginning is left out, and so is an empty rest after the last separator.
    """
    held, looked_at, dropping = bytearray(), 0, False
    first = True
    while block := file.read(BLOCK):
        held += block
        if first:
            first = False
            held = held.removeprefix(codecs.BOM_UTF8)
        start = 0
        while separator and (at := held.find(separator, max(start, looked_at))) >= 0:
            yield None if dropping or at - start > most else bytes(held[start:at])
            start, dropping = at + len(separator), False
        del held[:start]
        if len(held) > most + len(separator):
            dropping = True
        if dropping:
            del held[: len(held) - max(0, len(separator) - 1)]
        looked_at = max(0, len(held) - len(separator) + 1)
    if held or dropping:
        yield None if dropping or len(held) > most else bytes(held)


def _too_long(origin: str, reading: Reading) -> Reject:
    fix = "--lines or --separator cut text files into documents; --max-document allows more, and takes the memory"
    return Reject(origin, "document too long", f"more than {reading.most:,} bytes; {fix}")


def _json_document(origin: str, line: bytes, reading: Reading) -> Document | Reject:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Reject(origin, "not valid UTF-8", f"byte 0x{line[error.start]:02x}")
    except (ValueError, RecursionError) as error:
        what = str(error).partition("; use sys.")[0]  # the rest is advice for programmers
        return Reject(origin, "not valid JSON", f"{what[:200]}; expected one object per line")
    if not isinstance(record, dict):
        return Reject(origin, "not a JSON object", type(record).__name__)
    return record_document(origin, record, reading)


def record_document(origin: str, record: dict[str, Any], reading: Reading) -> Document | Reject:
    """The document that a record of fields is; or why it is none."""
    return reading.make(origin, record) if reading.make else _checked(origin, inside(record, reading.key), reading)


def inside(record: dict[str, Any], key: str) -> object:
    """The field `key`, or else the nested field that `key` names with dots; Missing if there is no such field."""
    value: object = record
    for name in (key,) if key in record else key.split("."):
        if not isinstance(value, dict) or name not in value:
            return Missing(tuple(value) if isinstance(value, dict) else ())
        value = value[name]
    return value


@dataclass(frozen=True)
class Missing:
    """The field is not there: `fields` are there instead."""

    fields: tuple[str, ...]


def _parquet(path: Path, reading: Reading, advanced: Callable[[int], None]) -> Iterator[Document | Reject]:
    if pyarrow is None:
        raise InputError(f"{path}: reading it needs the package `pyarrow`: pip install 'megalite[data]'")
    key, size = reading.key, path.stat().st_size
    try:
        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            schema, rows = file.schema_arrow, max(1, file.metadata.num_rows)
            fields = (key,) if key in schema.names else tuple(key.split("."))
            if (reject := _unlike_text(path, schema, fields, key)) is not None:
                yield reject
                return
            row = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=[fields[0]]):
                values = batch.column(fields[0])
                if fields[1:]:  # Python may have no values for other fields of the struct
                    values = pyarrow.compute.struct_field(values, fields[1:])
                for value in values.to_pylist():
                    row += 1
                    yield _checked(f"{path}:{row}", value, reading)
                advanced(size * row // rows - size * (row - len(batch)) // rows)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        yield Reject(str(path), UNREADABLE_FILE, str(error))


def _unlike_text(path: Path, schema: Any, fields: tuple[str, ...], key: str) -> Reject | None:
    """Reason why the column, or the field inside of a column, at `fields` holds no text; None if it holds text."""
    inside = pyarrow.struct(schema)
    for name in fields:
        names = [field.name for field in inside] if pyarrow.types.is_struct(inside) else []
        if names.count(name) > 1:
            return Reject(str(path), f"field {key!r} is not a string", f"there are {names.count(name)} of {name!r}")
        if name not in names:
            return missing(str(path), key, names)
        inside = inside.field(name).type
    plain = inside.value_type if pyarrow.types.is_dictionary(inside) else inside
    if any(getattr(pyarrow.types, holds)(plain) for holds in TEXT_TYPES):
        return None
    return Reject(str(path), f"field {key!r} is not a string", f"its type is {str(inside)[:200]}")


def _checked(origin: str, text: object, reading: Reading) -> Document | Reject:
    if isinstance(text, Missing):
        return missing(origin, reading.key, text.fields)
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            return Reject(origin, "not valid UTF-8", f"byte 0x{text[error.start]:02x}")
    if not isinstance(text, str):
        return Reject(origin, f"field {reading.key!r} is not a string", f"{type(text).__name__}")
    if not text or text.isspace():
        return Reject(origin, EMPTY_DOCUMENT)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can escape half a surrogate pair
        return Reject(origin, "not valid Unicode", f"lone surrogate {text[error.start]!a}")
    return Document(text) if size <= reading.most else _too_long(origin, reading)


def missing(origin: str, key: str, names: Iterable[str]) -> Reject:
    """A document without the field `key`, which has others."""
    return Reject(origin, f"no field {key!r}", f"the fields are {', '.join(names)[:500] or 'none'}")
