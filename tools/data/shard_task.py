"""One shard as a task: made once, kept while its record names the same input and settings, made anew otherwise."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import xxhash

from megalite.base.errors import InputError
from megalite.base.files import as_json, exists, read_object, write_whole
from megalite.base.json_shape import OrNull, ValueKind, digits, misfits
from megalite.data.description import COUNT, SHA256, Description
from megalite.data.exclusive_file import claim
from megalite.data.shards import shards_file
from megalite.data.store import TokenStore, token_dtype
from megalite.data.store_writer import StoreWriter, sweep
from megalite.data.tokenizer import tokenizer_hash
from megalite_tools.data.documents import Reject, Skipped
from megalite_tools.data.inputs import Input
from megalite_tools.data.preparation import Preparation, write_stores

FORMAT, VERSION = "megalite-shard", 1
MAX_RECORD_BYTES = 1 << 20
ANY_TEXT = ValueKind("a text", lambda value: isinstance(value, str))
SHAPE = {
    "format": ValueKind(f"{FORMAT!r}", lambda value: value == FORMAT),
    "version": ValueKind(f"{VERSION}", lambda value: value == VERSION),
    "settings": SHA256,
    "input": digits(32),
    "fingerprint": OrNull(SHA256),
    "documents": COUNT,
    "tokens": COUNT,
    "skipped": [{"reason": ANY_TEXT, "count": COUNT, "first": ANY_TEXT}],
}


@dataclass(frozen=True)
class Record:
    """Facts about a shard, beside its store: input and settings that it was made of, and the result."""

    settings: str  # hash of the settings, and of the names and sizes of the input
    input: str  # hash of the content of the input
    fingerprint: str | None = None  # hash of the store; None: it is being made for the first time
    documents: int = 0
    tokens: int = 0
    skipped: Skipped = field(default_factory=Skipped)

    @staticmethod
    def read(path: Path) -> "Record | None":
        """The record at `path`; None if there is none. Raises InputError for another file."""
        if not exists(path, follow=False):
            return None
        found = read_object(path, MAX_RECORD_BYTES)
        wrong = next(misfits(found, SHAPE, str(path)), None)
        if wrong is not None:
            raise InputError(f"{wrong}; it is no record of a shard: remove it and its shard, or choose another --out")
        skipped = Skipped()
        for each in found["skipped"]:
            skipped.counts[each["reason"]] = each["count"]
            skipped.first[each["reason"]] = Reject(each["first"], each["reason"])
        names = ("settings", "input", "fingerprint", "documents", "tokens")
        return Record(**{name: found[name] for name in names}, skipped=skipped)

    def write(self, path: Path) -> None:
        """Write it, whole or not at all. Raises InputError."""
        counts, first = self.skipped.counts, self.skipped.first
        skipped = [{"reason": why, "count": count, "first": first[why].origin} for why, count in counts.items()]
        fields = {name: value for name, value in vars(self).items() if name != "skipped"}
        write_whole(path, as_json({"format": FORMAT, "version": VERSION, **fields, "skipped": skipped}))


@dataclass(frozen=True)
class ShardTask:
    """The shard to be made of some inputs."""

    preparation: Preparation
    inputs: tuple[Input, ...]
    out: str  # the prefix of the list
    number: int
    shards: int  # in all
    folder: str  # in which paths that are relative begin

    @property
    def prefix(self) -> str:
        """The prefix of the shard's store."""
        return f"{self.out}-{self.number:05d}-of-{self.shards:05d}"

    @property
    def record(self) -> Path:
        """The path of its record."""
        return Path(f"{self.prefix}.record")

    @property
    def lock(self) -> Path:
        """The path of a file that its maker holds."""
        return Path(self.prefix).with_name(f".{Path(self.prefix).name}.lock")

    @property
    def bytes(self) -> int:
        """The size of its inputs."""
        return sum(each.bytes for each in self.inputs)

    @cached_property
    def settings(self) -> str:
        """Hash of the settings, and of the names and sizes of the inputs."""
        made = self.preparation
        values = asdict(made)
        values["reading"]["make"] = None if made.reading.make is None else repr(getattr(made.reading.make, "args", ()))
        del values["encoding"]["tokenizer"]  # a path: name and content of the file are in `values["tokenizer"]`
        inputs = [asdict(each) for each in self.inputs]
        text = json.dumps([version("megalite"), values, inputs], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def whole(self) -> Record | None:
        """The record of the shard, if it was made with the same settings and its store is whole. Reads no input."""
        record = Record.read(self.record)
        if record is None or record.settings != self.settings or record.fingerprint is None:
            return None
        with suppress(InputError):
            described = Description.read(self.prefix)
            found = TokenStore(self.prefix).fingerprint()
            if described is not None and described.fingerprint == record.fingerprint == found:
                return record
        return None

    def sweep(self) -> None:
        """Remove what a killed maker has left hidden, unless another is at work."""
        with suppress(InputError, OSError):
            if exists(self.lock):
                with claim(self.lock, self.prefix):
                    self.lock.unlink()
            sweep(self.prefix)


@contextmanager
def resumable() -> Iterator[None]:
    """Tell, where a disk is full, that the same command goes on."""
    try:
        yield
    except InputError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{error}; make room, and the same command goes on: finished shards are kept") from cause
        raise


@resumable()
def make_shard(task: ShardTask) -> Record:
    """Make the shard, unless it is there: whole, and of the same settings and input. Raises InputError.

    Input that changes while it is read is refused, and so is a changed one if the list of shards is there already.
    """
    os.chdir(task.folder)
    try:
        task.lock.parent.mkdir(parents=True, exist_ok=True)
        claimed = claim(task.lock, task.prefix)
    except OSError as error:
        raise InputError(f"{task.prefix}: cannot write the shard: {error.strerror}") from error
    with claimed:
        try:
            return _make(task)
        finally:
            task.lock.unlink(missing_ok=True)


def _make(task: ShardTask) -> Record:
    made = task.preparation
    if tokenizer_hash(made.encoding.tokenizer) != made.tokenizer.sha256:
        raise InputError(f"{made.encoding.tokenizer}: has changed since the preparation began; begin it again")
    before = _states(task)
    content = _hash(task.inputs)
    old, whole = Record.read(task.record), task.whole()
    if whole is not None and whole.input == content:
        return whole
    if old is None:
        for path in StoreWriter(task.prefix, token_dtype(1), masked=True).files:
            if os.path.lexists(path):
                raise InputError(f"{path}: exists already, and is no shard of ours; remove it or choose another name")
        Record(task.settings, content).write(task.record)
    elif (old.settings, old.input) != (task.settings, content) and exists(shards_file(task.out)):
        rule = f"{task.prefix} was made of other input or settings, and the list is complete"
        raise InputError(f"{shards_file(task.out)}: {rule}; remove it to make its shards anew, or choose another --out")

    def check_unchanged() -> None:
        if _states(task) != before:
            raise InputError(f"{task.prefix}: its input has changed while it was read; begin again when it is complete")

    skipped = Skipped()
    try:
        (writer,) = write_stores(
            made, task.inputs, [task.prefix], lambda _: 0, skipped, 1, lambda *_: check_unchanged(), shard=True
        )
    except InputError:
        check_unchanged()  # a change explains whatever is wrong with the input
        raise
    store = TokenStore(task.prefix)
    record = Record(task.settings, content, store.fingerprint(), writer.documents, writer.tokens, skipped)
    record.write(task.record)
    return record


def _states(task: ShardTask) -> list[object]:
    """The state of each input. Raises InputError for one that is not as it was when planned."""
    states: list[object] = []
    for each in task.inputs:
        try:
            states.append(each.state())
        except OSError as error:
            raise _unread(each, error) from error
    return states


def _hash(inputs: Sequence[Input]) -> str:
    digest = xxhash.xxh3_128()
    for each in inputs:
        try:
            each.identify(digest)
        except OSError as error:
            raise _unread(each, error) from error
    return digest.hexdigest()


def _unread(name: object, error: OSError) -> InputError:
    return InputError(f"{name}: cannot be read any more: {error.strerror}; finished shards are kept")
