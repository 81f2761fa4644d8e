"""Datasets of Hugging Face as inputs: folders that `save_to_disk` has written; others as streams, here or on the Hub.

They are read row by row with the package `datasets`, which runs no code of a dataset and reads no pickle.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from megalite.base.errors import InputError, listing
from megalite.base.files import is_file, is_folder, read_object
from megalite.base.late_import import import_for_good
from megalite.data.description import SourceFile
from megalite_tools.data.documents import Document, Reading, Reject, record_document

SCHEME = "hf:"
FIELDS = ("config", "split", "revision", "fingerprint")
FORM = f"{SCHEME}NAME[,config=…][,split=…][,revision=…][,fingerprint=…]"
DEFAULT_SPLIT = "train"
SPLITS, STATE = "dataset_dict.json", "state.json"  # files that save_to_disk writes
MAX_STATE_BYTES = 64 << 20
COMMIT = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})(/|$)")  # in the address of a dataset's files on the Hub


@dataclass(frozen=True)
class DatasetPart:
    """One of `parts` parts, each of consecutive rows or data files, of a split of a dataset whose content is known."""

    path: str  # a folder, or a name on the Hub
    config: str | None
    split: str | None  # None: a folder with one split that has no name
    revision: str | None  # commit on the Hub; None: it is a folder
    fingerprint: str | None  # identity of a folder; None: it is on the Hub
    saved: str | None  # the folder of the split, if save_to_disk has written it
    files: tuple[str, ...]  # data files of a folder
    split_bytes: int  # size of all data files
    most: int  # parts that the split can be cut into
    number: int = 0
    parts: int = 1

    def __str__(self) -> str:
        fields = ((field, getattr(self, field)) for field in FIELDS)
        return f"{SCHEME}{self.path}" + "".join(f",{field}={value}" for field, value in fields if value is not None)

    @property
    def bytes(self) -> int:
        """The share of the split's bytes."""
        return self.split_bytes * (self.number + 1) // self.parts - self.split_bytes * self.number // self.parts

    @property
    def source(self) -> SourceFile:
        """The split as a store's description names it, whichever part this is."""
        return SourceFile(str(self), self.split_bytes)

    def cut(self, parts: int) -> "list[DatasetPart]":
        """The split in `parts` parts, or in as many as it can be cut into."""
        parts = max(1, min(parts, self.most))
        return [replace(self, number=number, parts=parts) for number in range(parts)]

    def documents(self, reading: Reading, advanced: Callable[[int], None]) -> Iterator[Document | Reject]:
        """The document of every row, in order; `advanced` is called with numbers of characters.

        Raises InputError where a row cannot be read, as all that follow would be lost.
        """
        origin = str(self) if self.parts == 1 else f"{self}, part {self.number + 1} of {self.parts}"
        rows = _opened(replace(self, number=0, parts=1)).shard(self.parts, self.number, contiguous=True)
        kinds, make = rows.features or {}, reading.make
        column = reading.key if reading.key in kinds else reading.key.partition(".")[0]
        if make is None and column in kinds:
            rows = rows.select_columns([column])  # others need not be read, nor decoded
        for number, row in enumerate(_each(rows, origin), 1):
            record = row if make is None else {name: _without_nulls(row[name], kinds.get(name)) for name in row}
            document = record_document(f"{origin}:{number}", record, reading)
            advanced(len(document.text) if isinstance(document, Document) else 0)
            yield document

    def state(self) -> object:
        """Facts by which a change is noticed. Raises OSError, and InputError for other content than was found."""
        if self.revision is not None:
            return self.revision
        if _fingerprint(self.path, self.saved, self.files) != self.fingerprint:
            raise InputError(f"{self}: has changed since the preparation began; begin again: finished shards are kept")
        return _stamps(self.files)

    def identify(self, digest: xxhash.xxh3_128) -> None:
        """Add what identifies the content to a hash."""
        digest.update(str(self).encode(errors="surrogateescape"))


def find_dataset(named: str) -> DatasetPart:
    """The split that an input of the form FORM names.

    NAME is a folder or a name on the Hub. A revision may be a branch or a tag, and becomes the commit that it means
    now. A fingerprint has to be that of the folder. Raises InputError.
    """
    path, asked = _parsed(named)
    folder, split = Path(path), asked.get("split")
    if is_file(folder):
        raise InputError(f"{named}: is a file; name it without {SCHEME}, or the folder of a dataset")
    if is_file(folder / SPLITS):
        split = _chosen(named, read_object(folder / SPLITS, MAX_STATE_BYTES).get("splits"), split)
        found = _saved(path, str(folder / split), split)
    elif is_file(folder / STATE):
        found = _saved(path, path, None)
    else:
        found = _streamed(named, path, asked)
    for field, value in asked.items():
        has = getattr(found, field)
        if has != value and (field != "revision" or has is None):
            raise InputError(f"{named}: its {field} is {has or 'not known'}, not {value}; leave it out, or correct it")
    return found


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` has written the folder."""
    return is_file(folder / SPLITS) or is_file(folder / STATE)


def _parsed(named: str) -> tuple[str, dict[str, str]]:
    """The path and the fields of an input. A path may have commas."""
    words, asked = named.removeprefix(SCHEME).split(","), dict[str, str]()
    while len(words) > 1 and words[-1].partition("=")[0] in FIELDS:
        field, _, value = words.pop().partition("=")
        if not value or field in asked:
            raise InputError(f"{named}: {field} {'is given twice' if value else 'has no value'}; the form is {FORM}")
        asked[field] = value
    path = ",".join(words)
    if not path:
        raise InputError(f"{named}: names no dataset; the form is {FORM}")
    return path, asked


def _chosen(named: str, splits: Any, asked: str | None) -> str:
    """The split to read: the one asked for, or `train`, or the only one."""
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits) or not splits:
        raise InputError(f"{named}: tells of no split; write it again with the package `datasets`")
    split = asked or (splits[0] if len(splits) == 1 else DEFAULT_SPLIT)
    if split not in splits:
        raise InputError(f"{named}: has no split {split!r}; choose {listing(splits)} with ,split=…")
    return split


def _saved(path: str, folder: str, split: str | None) -> DatasetPart:
    """The dataset in a folder, which is that of a split or names its own."""
    with _explained(f"{SCHEME}{path}"):
        dataset = _load_saved(folder)
        split = split or (dataset.split and str(dataset.split))
        files = tuple(file["filename"] for file in dataset.cache_files)
        fingerprint, size = _fingerprint(path, folder, files), sum(size for size, *_ in _stamps(files))
        return DatasetPart(path, None, split, None, fingerprint, folder, files, size, len(dataset))


def _streamed(named: str, path: str, asked: Mapping[str, str]) -> DatasetPart:
    builder, commit = _builder(path, asked.get("config"), asked.get("revision"))
    found = {str(split): tuple(map(str, files)) for split, files in (builder.config.data_files or {}).items()}
    split = _chosen(named, list(found), asked.get("split"))
    files, name = found[split], builder.config.name
    with _explained(named):
        most = builder.as_streaming_dataset(split).num_shards
        if commit is not None:
            system, _ = fsspec.core.url_to_fs(files[0])
            return DatasetPart(path, name, split, commit, None, None, (), sum(map(system.size, files)), most)
        fingerprint, size = _fingerprint(path, None, files), sum(size for size, *_ in _stamps(files))
        return DatasetPart(path, name, split, None, fingerprint, None, files, size, most)


@lru_cache(maxsize=1)  # the parts of a split are read one after the other
def _opened(whole: DatasetPart) -> Any:
    """The split as a dataset of the package, on a disk or a stream: both have `shard`, `features` and rows."""
    with _explained(str(whole)):
        if whole.saved is not None:
            return _load_saved(whole.saved)
        return _builder(whole.path, whole.config, whole.revision)[0].as_streaming_dataset(whole.split)


def _load_saved(folder: str) -> Any:
    return _library().load_from_disk(folder).with_format(None)


def _builder(path: str, config: str | None, revision: str | None) -> tuple[Any, str | None]:
    """The builder of a stream, and the commit on the Hub that it is of; None: it is of a folder."""
    local = is_folder(path)
    with _explained(f"{SCHEME}{path}"):
        # A relative path could be the name of a format, such as json, which has a builder of its own.
        where = os.path.abspath(path) if local else path
        builder = _library().load_dataset_builder(where, config, revision=revision)
    if local:
        return builder, None
    commit = COMMIT.match(builder.base_path or "")
    if commit is None:  # a copy in the package's cache, of any revision
        raise InputError(f"{SCHEME}{path}: the Hub tells no commit of it; try again when the Hub can be reached")
    return builder, commit.group(1)


def _fingerprint(path: str, saved: str | None, files: Sequence[str]) -> str:
    """The fingerprint that `save_to_disk` has written, or a hash of names, sizes and times of change of the files."""
    if saved is not None:
        found = read_object(Path(saved) / STATE, MAX_STATE_BYTES).get("_fingerprint")
        if not isinstance(found, str):
            raise InputError(f"{Path(saved) / STATE}: tells of no fingerprint; write the dataset again")
        return found
    digest = xxhash.xxh3_128()
    for file, (size, changed, _) in zip(files, _stamps(files), strict=True):
        name = os.fsencode(os.path.relpath(file, os.path.realpath(path)))
        digest.update(b"%s\0%d\0%d\0" % (name, size, changed))
    return digest.hexdigest()


def _stamps(files: Sequence[str]) -> list[tuple[int, int, int]]:
    """Size, time of change and inode number of each file."""
    return [(found.st_size, found.st_mtime_ns, found.st_ino) for found in map(os.stat, files)]


def _each(rows: Any, origin: str) -> Iterator[dict[str, Any]]:
    with _explained(origin, "--on-error skip does not help, as all rows after it would be lost"):
        yield from rows


def _without_nulls(value: Any, kind: Any) -> Any:
    """A value without the fields that are null only because other rows have them; `content` may be null by itself.

    kind: the feature of the package, of which JSON has the fields of its own row alone; None: not known.
    """
    if isinstance(value, dict) and (kind is None or isinstance(kind, dict)):
        kept = (name for name, inner in value.items() if inner is not None or name == "content")
        return {name: _without_nulls(value[name], kind and kind.get(name)) for name in kept}
    if isinstance(value, list) and (kind is None or hasattr(kind, "feature")):
        return [_without_nulls(inner, kind and kind.feature) for inner in value]
    return value


@contextmanager
def _explained(what: str, fix: str = f"the form is {FORM}") -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the package raises its own errors, and those of what it reads with
        raise InputError(f"{what}: cannot be read: {type(error).__name__}: {error}; {fix}") from error


@cache
def _library() -> Any:
    """The package `datasets`, which takes a second to import. It writes nothing to the terminal."""
    try:
        library: Any = import_for_good("datasets")
    except ImportError:
        raise InputError(
            "datasets of Hugging Face need the package `datasets`: pip install 'megalite[datasets]'"
        ) from None
    library.disable_progress_bars()
    library.logging.set_verbosity(library.logging.CRITICAL)
    return library
