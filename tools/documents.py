"""Documents from text, JSON Lines and Parquet files, plain or compressed."""

import codecs
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from megalite.config.errors import InputError

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:  # optional: pip install megalite[data]
    pyarrow = None
try:
    import zstandard
except ImportError:  # optional: pip install megalite[data]
    zstandard = None  # type: ignore[assignment]

ZSTD = (".zst", ".zstd")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET_ROWS = 1024  # rows decoded at a time

EMPTY = "empty document"
UNREADABLE = "unreadable file"


@dataclass(frozen=True)
class Document:
    text: str


@dataclass(frozen=True)
class Reject:
    """A document that cannot be used: where it is, the kind of trouble, and what exactly."""

    origin: str  # FILE, FILE:LINE or FILE:ROW
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}" + (f": {self.detail}" if self.detail else "")


def find_files(inputs: Iterable[str], pattern: str) -> list[Path]:
    """The files named by `inputs`, in order; a directory stands for what `pattern` matches in it, sorted.

    Raises InputError for a missing path, a directory without a match, and a file that is named twice.
    """
    files: dict[Path, Path] = {}
    for path in map(Path, inputs):
        for file in _matches(path, pattern) if path.is_dir() else [path]:
            if not file.is_file():
                raise InputError(f"{file}: no such file or directory")
            if file.resolve() in files:
                raise InputError(f"{file}: given twice; its documents would be repeated")
            files[file.resolve()] = file
    return list(files.values())


def read_documents(path: Path, key: str) -> Iterator[Document | Reject]:
    """Every document of one file; `key` names the JSON field or Parquet column that holds the text.

    `.jsonl`, `.ndjson`, `.json`: one JSON object per line. `.parquet`: one row. Anything else: UTF-8 text, one
    document per file. All but Parquet may be compressed (`.gz`, `.zst`, `.zstd`). Memory: one document, or 1,024
    rows. What cannot be used comes as a Reject; only a missing optional package raises InputError.
    """
    suffix = Path(path.stem).suffix if path.suffix in (".gz", *ZSTD) else path.suffix
    try:
        if suffix == ".parquet":
            yield from _parquet(path, key)
        else:
            with _open(path) as file:
                yield from _json_lines(path, file, key) if suffix in JSON_LINES else _text(path, file)
    except (OSError, EOFError, zlib.error) as error:
        yield Reject(str(path), UNREADABLE, str(error))


@dataclass
class Skipped:
    """Documents left out so far, by reason, with the first of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, Reject] = field(default_factory=dict)

    def add(self, reject: Reject) -> None:
        self.counts[reject.reason] += 1
        self.first.setdefault(reject.reason, reject)

    def nothing_kept(self) -> str:
        """The message for an input that is left without a document."""
        return "no usable document in the input: " + ("; ".join(self.lines()) or "it is empty")

    def lines(self) -> list[str]:
        """One line for each reason."""
        return [f"{count:,} × {reason}, first {self.first[reason].origin}" for reason, count in self.counts.items()]


def read_texts(files: Iterable[Path], key: str, on_error: Literal["stop", "skip"], skipped: Skipped) -> Iterator[str]:
    """The text of every usable document of `files`, in order; the others are added to `skipped`.

    Raises InputError at the first unusable document if `on_error` is "stop". Empty documents are always skipped.
    """
    for path in files:
        for document in read_documents(path, key):
            if isinstance(document, Document):
                yield document.text
            elif on_error == "skip" or document.reason == EMPTY:
                skipped.add(document)
            else:
                raise InputError(f"{document}; --on-error skip leaves such documents out")


def _matches(folder: Path, pattern: str) -> list[Path]:
    try:
        matches = sorted(match for match in folder.glob(pattern) if match.is_file())
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"--glob {pattern!r}: {error}") from error
    if not matches:
        raise InputError(f"{folder}: no file in this directory matches --glob {pattern!r}")
    return matches


def _text(path: Path, file: io.BufferedIOBase) -> Iterator[Document | Reject]:
    raw = file.read()
    try:
        yield _checked(str(path), raw.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        yield Reject(f"{path}:{line}", "not valid UTF-8", f"byte 0x{error.object[error.start]:02x}")


def _json_lines(path: Path, file: io.BufferedIOBase, key: str) -> Iterator[Document | Reject]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.isspace():
            yield _json_document(f"{path}:{number}", line, key)


def _json_document(origin: str, line: bytes, key: str) -> Document | Reject:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Reject(origin, "not valid UTF-8", f"byte 0x{line[error.start]:02x}")
    except (ValueError, RecursionError) as error:
        return Reject(origin, "not valid JSON", f"{error}; expected one object per line")
    if not isinstance(record, dict):
        return Reject(origin, "not a JSON object", type(record).__name__)
    if key not in record:
        return Reject(origin, f"no field {key!r}", f"the fields are {', '.join(record) or 'none'}")
    return _checked(origin, record[key], key)


def _parquet(path: Path, key: str) -> Iterator[Document | Reject]:
    if pyarrow is None:
        raise InputError(f"{path}: reading it needs the package `pyarrow`: pip install megalite[data]")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if key not in file.schema_arrow.names:
                yield Reject(str(path), f"no field {key!r}", f"the columns are {', '.join(file.schema_arrow.names)}")
                return
            batches = file.iter_batches(PARQUET_ROWS, columns=[key])
            values = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for row, value in enumerate(values, 1):
                yield _checked(f"{path}:{row}", value, key)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        yield Reject(str(path), UNREADABLE, str(error))


def _checked(origin: str, text: object, key: str = "") -> Document | Reject:
    if not isinstance(text, str):
        return Reject(origin, f"field {key!r} is not a string", f"{type(text).__name__}")
    if not text or text.isspace():
        return Reject(origin, EMPTY)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a surrogate pair
        return Reject(origin, "not valid Unicode", f"lone surrogate {text[error.start]!a}")
    return Document(text)


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.GzipFile(path)
    if path.suffix in ZSTD:
        if zstandard is None:
            raise InputError(f"{path}: reading it needs the package `zstandard`: pip install megalite[data]")
        return io.BufferedReader(_ZstdFile(path), 1 << 20)
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """All frames of a compressed file, one after the other.

    zstandard's own reader takes a truncated file for a short one; here that is an EOFError.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False  # a frame has begun and not ended
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            chunk = self._compressed or self._file.read(1 << 16)
            if not chunk:
                if self._inside:
                    raise EOFError("the compressed file is truncated")
                return 0
            try:
                self._plain = memoryview(self._frame.decompress(chunk))
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._inside = not self._frame.eof
            self._compressed = b""
            if self._frame.eof:
                self._compressed = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        target = memoryview(buffer)
        count = min(len(target), len(self._plain))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
