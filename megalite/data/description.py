"""The description of a token store in its `PREFIX.json`: its tokenizer, end of documents, largest id, and sources.

megalite writes it with every store. Megatron's stores have none.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import exists, read_object
from megalite.base.json_shape import OrNull, ValueKind, digits, misfits, whole
from megalite.config.rules.files import MAX_DESCRIPTION_BYTES

FORMAT = "megalite token store"
VERSION = 1
MAX_SOURCES = 100  # sources that are listed one by one
MAX_TEXT_LENGTH = 4096  # characters of a name or path
COUNT, SHA256 = whole(0, 62), digits(64)
NAME = ValueKind(
    f"a text of 1 to {MAX_TEXT_LENGTH:,} characters",
    lambda value: isinstance(value, str) and 0 < len(value) <= MAX_TEXT_LENGTH,
)
FIELDS = {  # beside `format` and `version`
    "megalite": NAME,
    "fingerprint": SHA256,
    "documents": COUNT,
    "tokens": COUNT,
    "largest_id": whole(-1, 62),
    "end_of_document": OrNull(COUNT),
    "tokenizer": OrNull({"file": NAME, "sha256": SHA256}),
    "sources": [{"path": NAME, "bytes": COUNT}],
    "source_files": COUNT,
    "trained_tokens": COUNT,
    "packed": whole(1, 62),
}
OPTIONAL = ("trained_tokens", "packed")  # fields that only some stores have


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer, identified by the content of its file, wherever the file lies."""

    file: str  # name
    sha256: str


@dataclass(frozen=True)
class SourceFile:
    """A file that documents were read from."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Description:
    """Facts about one token store."""

    megalite: str  # the version that wrote it
    fingerprint: str  # hash of the other files
    documents: int
    tokens: int
    largest_id: int  # −1: there is no token
    end_of_document: int | None = None  # the id that every document ends with, if that is known
    tokenizer: TokenizerFile | None = None
    sources: tuple[SourceFile, ...] = ()  # the first MAX_SOURCES
    source_files: int = 0  # in all
    trained_tokens: int | None = None  # by the mask; None, and not in the file: there is none
    packed: int | None = None  # tokens of the sequences that whole documents fill; None, and not in the file: none

    def render(self) -> str:
        """The text of the file."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(self)}
        fields = {name: value for name, value in fields.items() if name not in OPTIONAL or value is not None}
        text = json.dumps(fields, indent=2, ensure_ascii=False)
        return text.encode(errors="backslashreplace").decode() + "\n"  # file names need not be UTF-8

    @staticmethod
    def read(prefix: str | Path) -> "Description | None":
        """The description of the store `prefix`; None if it has none. Raises InputError if the file was changed."""
        path = description_file(prefix)
        if not exists(path, follow=False):
            return None
        found = read_object(path, MAX_DESCRIPTION_BYTES)
        if found.pop("format", None) != FORMAT:
            raise InputError(f"{path}: is not what megalite writes beside a store; move it away, or name another store")
        version = found.pop("version", None)
        unknown = sorted(found.keys() - FIELDS.keys())
        if type(version) is not int or version != VERSION or unknown:
            more = f", with the unknown fields {', '.join(unknown)[:200]}" if unknown else ""
            rule = f"has version {repr(version)[:20]}{more}; this megalite reads the number {VERSION}"
            raise InputError(f"{path}: {rule}")
        return _checked(path, {"end_of_document": None, **found})


def join_descriptions(described: Sequence[Description], fingerprint: str) -> Description:
    """The description of the store that has the documents of stores of one tokenizer, one after the other.

    A source file that several of them name counts once.
    """
    ends = {each.end_of_document for each in described}
    sources = tuple(dict.fromkeys(source for each in described for source in each.sources))
    trained = [each.trained_tokens for each in described if each.trained_tokens is not None]
    return Description(
        version("megalite"),
        fingerprint,
        sum(each.documents for each in described),
        sum(each.tokens for each in described),
        max(each.largest_id for each in described),
        ends.pop() if len(ends) == 1 else None,
        described[0].tokenizer,
        sources[:MAX_SOURCES],
        len(sources) + sum(each.source_files - len(each.sources) for each in described),
        sum(trained) if trained else None,
        described[0].packed if len(described) == 1 else None,
    )


def description_file(prefix: str | Path) -> Path:
    """The path of a store's `.json`."""
    return Path(f"{prefix}.json")


def _checked(path: Path, found: dict[str, Any]) -> Description:
    """Raises InputError for fields that no store can have."""
    fields = {name: kind for name, kind in FIELDS.items() if name not in OPTIONAL or name in found}
    wrong = next(misfits(found, fields, str(path)), None) or _contradiction(path, found)
    if wrong is not None:
        raise InputError(f"{wrong}; the file is damaged, or was changed by hand")
    sources = tuple(SourceFile(**source) for source in found.pop("sources"))
    tokenizer = found.pop("tokenizer")
    return Description(**found, tokenizer=None if tokenizer is None else TokenizerFile(**tokenizer), sources=sources)


def _contradiction(path: Path, found: dict[str, Any]) -> str | None:
    """Message on a contradiction between well-formed fields; None if there is none."""
    tokens, largest, end = found["tokens"], found["largest_id"], found["end_of_document"]
    if (largest < 0) != (tokens == 0):
        return f"{path}: largest_id is {largest} of {tokens} tokens"
    if end is not None and tokens and end > largest:
        return f"{path}: end_of_document is {end}, above largest_id, {largest}"
    if (trained := found.get("trained_tokens")) is not None and trained > tokens:
        return f"{path}: trained_tokens is {trained} of {tokens} tokens"
    if len(found["sources"]) > MAX_SOURCES:
        return f"{path}: lists {len(found['sources'])} sources, of which {MAX_SOURCES} are allowed"
    return None
