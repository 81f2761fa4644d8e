"""The inputs of programs that read documents: the options that name them, and their texts, one after the other."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from megalite.base.errors import InputError
from megalite.base.files import exists, is_file, is_folder
from megalite.data.description import SourceFile
from megalite_tools.data.documents import (
    DEFAULT_KEY,
    EMPTY_DOCUMENT,
    MAX_DOCUMENT_BYTES,
    Document,
    Reading,
    Reject,
    Skipped,
    read_documents,
    refuse,
)
from megalite_tools.data.hf_dataset import FORM, SCHEME, DatasetPart, find_dataset, is_saved
from megalite_tools.data.opened import FORMATS, UnknownFormatError, check_encoding, format_of

BLOCK = 1 << 20  # bytes of a file hashed at a time


@dataclass(frozen=True)
class InputFile:
    """A file of documents, as it was found."""

    path: Path
    bytes: int

    def __str__(self) -> str:
        return str(self.path)

    @property
    def source(self) -> SourceFile:
        """The file as a store's description names it."""
        return SourceFile(str(self.path), self.bytes)

    def cut(self, parts: int) -> "list[InputFile]":
        """The file, as it is not cut."""
        return [self]

    def documents(self, reading: Reading, advanced: Callable[[int], None]) -> Iterator[Document | Reject]:
        """Every document of it, as `read_documents` yields them."""
        return read_documents(self.path, reading, advanced)

    def state(self) -> tuple[int, int, int]:
        """Size, time of change and inode number, by which changes show. Raises OSError; InputError for a new size."""
        found = self.path.stat()
        if found.st_size != self.bytes:
            rule = f"has {found.st_size:,} bytes, and had {self.bytes:,} when the preparation began"
            raise InputError(f"{self.path}: {rule}; begin again when it is complete: finished shards are kept")
        return found.st_size, found.st_mtime_ns, found.st_ino

    def identify(self, digest: xxhash.xxh3_128) -> None:
        """Add the content to a hash. Raises OSError."""
        with self.path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                digest.update(block)


Input = InputFile | DatasetPart


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of programs that read documents."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=f"a file, a directory of files, or {FORM}, a dataset of Hugging Face: a folder or a name on the Hub",
    )
    parser.add_argument(
        "--glob", help="files to take from a directory, as '**/*.txt' (default: all whose suffix tells of a format)"
    )
    parser.add_argument("--format", choices=FORMATS, help="format of the files (default: by suffix)")
    parser.add_argument("--encoding", default="utf-8", help="encoding of text and JSON Lines (default: %(default)s)")
    parser.add_argument(
        "--json-key",
        default=DEFAULT_KEY,
        metavar="KEY",
        help="field or column that holds the text, such as meta.text (default: %(default)s)",
    )
    parser.add_argument(
        "--max-document",
        type=int,
        default=MAX_DOCUMENT_BYTES,
        metavar="BYTES",
        help="the most text that a document may have (default: %(default)s)",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="where a document or file cannot be used: stop and write nothing, or leave it out and count it "
        "(default: %(default)s)",
    )


def reading_of(options: argparse.Namespace, separator: str | None = None) -> Reading:
    """Settings for reading, from the options of `add_reading_options`. Raises InputError if they are not valid."""
    check_encoding(options.encoding)
    if options.max_document < 1:
        raise InputError(f"--max-document {options.max_document}: must be at least 1")
    if separator == "":
        raise InputError("--separator is empty; give the text that stands between documents")
    if separator is not None and not separator.isascii():
        try:
            separator.encode()
        except UnicodeEncodeError:
            raise InputError(f"--separator {separator!a} is not valid UTF-8; give it in UTF-8") from None
    return Reading(options.json_key, options.format, options.encoding, separator, options.max_document)


def find_inputs(
    named: Iterable[str], pattern: str | None, reading: Reading, on_error: Literal["stop", "skip"], skipped: Skipped
) -> list[Input]:
    """The files and datasets named, in order. A directory stands for the files in it that match `pattern`, sorted.

    Without a pattern, a directory stands for all its files of known formats. Hidden files are left out, and files of
    other formats are added to `skipped`. If a file is named twice, by whatever names, the second is added to `skipped`
    if `on_error` is "skip"; otherwise InputError is raised. InputError is also raised for a missing path, a directory
    without a match, and a named file whose format is not known.
    """
    inputs: dict[object, Input] = {}
    for name in named:
        if name.startswith(SCHEME):
            dataset = find_dataset(name)
            if inputs.setdefault(str(dataset), dataset) is not dataset:
                refuse(Reject(name, "given twice", "its documents would be repeated"), on_error, skipped)
            continue
        path = Path(name)
        if not is_folder(path):
            found = [path]
        elif is_saved(path):
            raise InputError(f"{path}: is a dataset that save_to_disk has written; name it {SCHEME}{path}")
        elif pattern is None:
            found = _known(path, reading, skipped)
        else:
            found = _matches(path, pattern)
        for file in found:
            if not is_file(file):
                rule = "not a regular file" if exists(file) else "no such file or directory"
                raise InputError(f"{file}: {rule}")
            format_of(file, reading.format)
            status = file.stat()
            each = InputFile(file, status.st_size)
            first = inputs.setdefault((status.st_dev, status.st_ino), each)
            if first is not each:
                reject = Reject(str(file), "given twice", f"it is {first}, whose documents would be repeated")
                refuse(reject, on_error, skipped)
    return list(inputs.values())


def read_texts(
    inputs: Iterable[Input],
    reading: Reading,
    on_error: Literal["stop", "skip"],
    skipped: Skipped,
    advanced: Callable[[int], None] = lambda _: None,
) -> Iterator[str]:
    """The text of every usable document of `inputs`, in order; the others are added to `skipped`.

    advanced: called with byte counts that sum to the total size of all inputs. Raises InputError at the first unusable
    document if `on_error` is "stop". Empty documents are always skipped.
    """
    for each in inputs:
        left = each.bytes

        def read(count: int) -> None:
            nonlocal left
            count = min(count, left)  # texts of a dataset may be longer than its files
            left -= count
            advanced(count)

        for document in each.documents(reading, read):
            if isinstance(document, Document):
                yield document.text
            else:
                refuse(document, "skip" if document.reason == EMPTY_DOCUMENT else on_error, skipped)
        advanced(left)  # the rest of a damaged file, which is not read


def _known(folder: Path, reading: Reading, skipped: Skipped) -> list[Path]:
    """The files at any depth whose format is known, except hidden ones and those in hidden folders.

    Files of unknown format are added to `skipped`. Raises InputError if no file is left.
    """
    known = []
    for file in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in file.relative_to(folder).parts) or not is_file(file):
            continue
        try:
            format_of(file, reading.format)
        except UnknownFormatError:
            skipped.add(Reject(str(file), "unknown format"))
        else:
            known.append(file)
    if not known:
        raise InputError(f"{folder}: no file in this directory has a suffix that tells of a format; --format says it")
    return known


def _matches(folder: Path, pattern: str) -> list[Path]:
    try:
        matches = sorted(match for match in folder.glob(pattern) if is_file(match))
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"--glob {pattern!r}: {error}") from error
    if not matches:
        raise InputError(f"{folder}: no file in this directory matches --glob {pattern!r}")
    return matches
