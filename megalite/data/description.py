"""What a token store's own `PREFIX.json` says of it: the tokenizer, the end of documents, the largest id, the sources.

megalite writes it with every store. Megatron's stores have none.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megalite.config.errors import InputError
from megalite.config.files import read_object

FORMAT = "megalite token store"
VERSION = 1
MOST = 4 << 20  # bytes of such a file
MOST_SOURCES = 100  # that are listed one by one
MOST_TEXT = 4096  # characters of a name or path
COUNT = 1 << 62  # nothing that is counted here reaches it
HEX = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer, wherever its file lies."""

    file: str  # name
    sha256: str


@dataclass(frozen=True)
class SourceFile:
    """A file that documents were read from."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Description:
    """Of one token store."""

    megalite: str  # the version that wrote it
    fingerprint: str  # of the two other files
    documents: int
    tokens: int
    largest_id: int  # −1: there is no token
    end_of_document: int | None = None  # the id that every document ends with, if that is known
    tokenizer: TokenizerFile | None = None
    sources: tuple[SourceFile, ...] = ()  # the first MOST_SOURCES
    source_files: int = 0  # in all

    def render(self) -> str:
        """The text of the file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def read(prefix: str | Path) -> "Description | None":
        """That of the store `prefix`; None: it has none. Raises InputError for a file that is not as it was written."""
        path = description_file(prefix)
        if not path.exists() and not path.is_symlink():
            return None
        found = read_object(path, MOST)
        if found.pop("format", None) != FORMAT:
            raise InputError(f"{path}: is not what megalite writes beside a store; move it away, or name another store")
        version = found.pop("version", None)
        unknown = sorted(found.keys() - {field.name for field in fields(Description)})
        if version != VERSION or unknown:
            more = f", with the unknown fields {', '.join(unknown)[:200]}" if unknown else ""
            raise InputError(f"{path}: has version {str(version)[:20]}{more}; this megalite reads version {VERSION}")
        try:
            return _checked(found)
        except _WrongError as error:
            raise InputError(f"{path}: {error}; the file is damaged, or was changed by hand") from None


def description_file(prefix: str | Path) -> Path:
    """The `.json` of a store."""
    return Path(f"{prefix}.json")


class _WrongError(Exception):
    """What is wrong with a field."""


def _checked(found: dict[str, Any]) -> Description:
    sources = _take(found, "sources", lambda value: isinstance(value, list) and len(value) <= MOST_SOURCES, "a list")
    tokenizer = _take(found, "tokenizer", lambda value: value is None or isinstance(value, dict), "an object or null")
    tokens, largest = _count(found, "tokens"), _count(found, "largest_id", -1)
    end = None if found.get("end_of_document") is None else _count(found, "end_of_document")
    if (largest < 0) != (tokens == 0):
        raise _WrongError(f"largest_id is {largest} of {tokens} tokens")
    if end is not None and tokens and end > largest:
        raise _WrongError(f"end_of_document is {end}, above largest_id, {largest}")
    return Description(
        _text(found, "megalite"),
        _hash(found, "fingerprint"),
        _count(found, "documents"),
        tokens,
        largest,
        end,
        None if tokenizer is None else TokenizerFile(_text(tokenizer, "file"), _hash(tokenizer, "sha256")),
        tuple(SourceFile(_text(source, "path"), _count(source, "bytes")) for source in map(_object, sources)),
        _count(found, "source_files"),
    )


def _take(found: dict[str, Any], name: str, fits: Callable[[Any], bool], rule: str) -> Any:
    if name not in found:
        raise _WrongError(f"{name} is missing")
    if not fits(found[name]):
        raise _WrongError(f"{name} is {str(found[name])[:50]!r}, not {rule}")
    return found[name]


def _count(found: dict[str, Any], name: str, least: int = 0) -> int:
    def fits(value: object) -> bool:
        return type(value) is int and least <= value < COUNT  # a bool is no count

    count: int = _take(found, name, fits, f"a whole number from {least}")
    return count


def _text(found: dict[str, Any], name: str) -> str:
    text: str = _take(found, name, lambda value: isinstance(value, str) and 0 < len(value) <= MOST_TEXT, "a text")
    return text


def _hash(found: dict[str, Any], name: str) -> str:
    def fits(value: object) -> bool:
        return isinstance(value, str) and HEX.fullmatch(value) is not None

    digest: str = _take(found, name, fits, "a SHA-256")
    return digest


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongError(f"sources holds {str(value)[:50]!r}, not an object")
    return value
