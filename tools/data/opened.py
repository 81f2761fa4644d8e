"""Opens text files as streams of UTF-8: finds their format, decompresses them, and converts other encodings."""

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from megalite.base.errors import InputError, listing

try:
    import zstandard
except ImportError:  # optional: pip install megalite[data]
    zstandard = None  # type: ignore[assignment]

Format = Literal["text", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[str, Format] = dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")
SUFFIXES |= dict.fromkeys((".parquet",), "parquet")
SUFFIXES |= dict.fromkeys((".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp"), "text")
SUFFIXES |= dict.fromkeys((".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql"), "text")
NON_FILE_ENCODINGS = ("idna", "punycode", "unicode-escape", "raw-unicode-escape")  # for host names and Python source
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
BLOCK = 1 << 16  # bytes read from a file at a time
ZSTD_BLOCK = 1 << 9  # bytes of Zstandard read at a time: at most 128 blocks, none above 128 KiB when decompressed


class UnknownFormatError(InputError):
    """The format of a file is neither given nor known from its suffix."""


def format_of(path: Path, asked: Format | None = None) -> Format:
    """The format of a file: `asked`, or else by suffix, in upper or lower case, before that of a compression.

    Raises UnknownFormatError for an unknown suffix, InputError for compressed Parquet.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSED_SUFFIXES
    suffix = "".join(suffixes[-2:-1] if compressed else suffixes[-1:])
    found = asked or SUFFIXES.get(suffix)
    if found is None:
        what = f"the suffix {suffix} tells of no format" if suffix else "without a suffix its format is not known"
        raise UnknownFormatError(f"{path}: {what}; --format {listing(FORMATS)} says what it is")
    if found == "parquet" and compressed:
        raise InputError(f"{path}: Parquet files have a compression of their own; decompress the file first")
    return found


def check_encoding(name: str) -> None:
    """Raises InputError for an encoding that Python does not know, or that is not for text files."""
    try:
        "text".encode(name)
        if codecs.lookup(name).name in NON_FILE_ENCODINGS:
            raise LookupError("is not an encoding of files; name the one that the text was saved in")
        codecs.getincrementaldecoder(name)
    except (LookupError, UnicodeError, ValueError) as error:
        raise InputError(f"--encoding {name}: {error}") from None


def open_utf8(path: Path, encoding: str, advanced: Callable[[int], None]) -> io.BufferedIOBase:
    """The text of a file, which may be compressed, as UTF-8. Memory does not depend on the compression ratio.

    advanced: called with the number of bytes read from the file. Reading may raise OSError, EOFError, zlib.error or
    lzma.LZMAError; for text that is not in `encoding`, it raises UnicodeError, unless `encoding` is UTF-8.
    """
    # gzip and Zstandard read an empty file as an empty text
    if path.suffix.lower() in COMPRESSED_SUFFIXES and path.stat().st_size == 0:
        raise EOFError("the compressed file is truncated: it has no bytes")
    raw = io.BufferedReader(_Counted(path, advanced), BLOCK)
    plain: Any = raw
    match path.suffix.lower():
        case ".gz":
            plain = gzip.GzipFile(fileobj=raw)
        case ".bz2":
            plain = bz2.BZ2File(raw)
        case ".xz":
            plain = lzma.LZMAFile(raw)  # noqa: SIM115 - closed by the caller
        case ".zst" | ".zstd":
            if zstandard is None:
                raise InputError(f"{path}: reading it needs the package `zstandard`: pip install 'megalite[data]'")
            plain = io.BufferedReader(_ZstdFile(raw), BLOCK)
    if codecs.lookup(encoding).name == "utf-8":
        return plain
    return io.BufferedReader(_Transcoded(plain, encoding), BLOCK)


class _Stream(io.RawIOBase):
    """A stream of the bytes that `more` returns."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self.source = source
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            more = self.more()
            if more is None:
                return 0
            self._plain = memoryview(more)
        target = memoryview(buffer)
        count = min(len(target), len(self._plain))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def more(self) -> bytes | None:
        """The next bytes, which may be empty; None at the end."""
        raise NotImplementedError

    def close(self) -> None:
        self.source.close()
        super().close()


class _ZstdFile(_Stream):
    """The text of all frames of a compressed file, one after the other.

    A truncated file raises EOFError; zstandard's own reader would read it as a short file.
    """

    def __init__(self, source: io.BufferedIOBase) -> None:
        super().__init__(source)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False  # a frame has begun and not ended
        self._compressed = b""

    def more(self) -> bytes | None:
        chunk = self._compressed or self.source.read(ZSTD_BLOCK)
        if not chunk:
            if self._inside:
                raise EOFError("the compressed file is truncated")
            return None
        try:
            plain = self._frame.decompress(chunk)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._inside = not self._frame.eof
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        return plain


class _Transcoded(_Stream):
    """Converts text in another encoding to UTF-8."""

    def __init__(self, source: io.BufferedIOBase, encoding: str) -> None:
        super().__init__(source)
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ended = False

    def more(self) -> bytes | None:
        if self._ended:
            return None
        chunk = self.source.read(BLOCK)
        self._ended = not chunk
        return self._decoder.decode(chunk, final=self._ended).encode(errors="surrogatepass")


class _Counted(io.RawIOBase):
    """A file that reports how many bytes were read from it."""

    def __init__(self, path: Path, advanced: Callable[[int], None]) -> None:
        self._file = path.open("rb", buffering=0)
        self._advanced = advanced

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._advanced(count)
        return count

    def close(self) -> None:
        with suppress(AttributeError):  # opening has failed
            self._file.close()
        super().close()
