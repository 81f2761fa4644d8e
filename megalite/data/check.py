"""Checks of a run's data before the first step, so that no later step can fail because of a token or a document."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megalite.base.errors import InputError, Problem, counted, listing, printable
from megalite.base.files import read_object, write_object
from megalite.base.output import warn
from megalite.config.model_schema import Model
from megalite.config.schema import Data
from megalite.data.description import Description, description_file, join_descriptions
from megalite.data.joined_store import at_once, open_store
from megalite.data.mask import mask_file
from megalite.data.store import Scan, TokenStore
from megalite.data.tokenizer import Tokenizer, tokenizer_hash
from megalite.data.trial import open_tokenizer_file

SAMPLED_DOCUMENTS = 64  # documents of a described store whose last token is read
NOTICE_INTERVAL = 10.0  # seconds between two words on a scan
MAX_RECORD_BYTES = 16 << 20  # bytes


@dataclass(frozen=True)
class Checked:
    """Findings of the checks of a run's data."""

    end_of_document: int | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """Scan and description of one store."""

    scan: Scan
    description: Description | None


class Scans:
    """Results of scans of stores, kept in a file under the stores' fingerprints. An unusable file counts as none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed = False
        try:
            self.stores: dict[str, Any] = dict(read_object(path, MAX_RECORD_BYTES)["stores"])
        except (InputError, KeyError, TypeError, ValueError):
            self.stores = {}

    def of(self, store: TokenStore, tick: Callable[[], None]) -> Scan:
        """The result for `store`, which is read unless that has been done and it has not changed since."""
        modified = [file.version for file in store.files]
        key = store.fingerprint()
        entry = self.stores.get(key)
        if isinstance(entry, dict) and entry.get("modified") == modified:
            largest, end, trained = (entry.get(field.name) for field in fields(Scan))
            if type(largest) is int and all(number is None or type(number) is int for number in (end, trained)):
                return Scan(largest, end, trained)
        scan = store.verify(advanced=_Telling(store, tick))
        self.stores[key] = {"modified": modified} | asdict(scan)
        self.changed = True
        return scan

    def keep(self) -> None:
        """Write new results into the file. Warns if that cannot be written to: the next start will scan again."""
        if not self.changed:
            return
        try:
            write_object(self.path, {"stores": self.stores})
        except InputError as error:
            warn(f"{error}; the next start will read the data once more")


def check_data(data: Data, model: Model, scans: Scans, tick: Callable[[], None] = lambda: None) -> Checked:
    """Refuse tokenizers and stores that do not belong together, or not to a model.

    A store without a description is read whole, unless `scans` has the result; new results are not written. tick:
    called as reading goes on. Raises InputError with every problem.
    """
    vocab_size = model.vocab_size
    tokenizer = None if data.tokenizer is None else open_tokenizer_file(data.tokenizer)
    lists = {"data.train": data.train, "data.valid": data.valid}
    sources = [(f"{key}[{i}].path", source.path) for key, listed in lists.items() for i, source in enumerate(listed)]
    stores = {path: open_store(path, data.remote) for _, path in sources}
    known = {path: _know(store, scans, tick) for path, store in stores.items()}
    end = _end_of_document(data, known, tokenizer)
    problems = [*_tokenizer_problems(data, tokenizer, vocab_size), *_end_problems(data, end, stores, vocab_size)]
    for key, path in sources:
        problems += _problems(key, stores[path], known[path], data, vocab_size)
    if problems:
        raise InputError(problems)
    warnings = [*_cut_warnings(known, model.sequence_length), *_warnings(data, end, stores, known)]
    return Checked(end, tuple(warnings))


def checked_description(store: TokenStore) -> Description | None:
    """The description of a store that has one. Raises InputError if the store contradicts it.

    A list of shards has one made of theirs, if all of them have one.
    """
    sampled = -(-SAMPLED_DOCUMENTS // len(store.shards))
    described = at_once(partial(_checked_description, sampled), store.shards)
    found = [description for description in described if description is not None]
    if len(found) < len(described):
        return None
    return found[0] if store.shards == (store,) else join_descriptions(found, store.fingerprint())


def _checked_description(sampled: int, store: TokenStore) -> Description | None:
    """sampled: documents whose last token is read."""
    found, path = Description.read(store.description_prefix), description_file(store.description_prefix)
    if found is None:
        return None
    inspect = f"megalite-inspect-data {store.prefix}"
    if (found.documents, found.tokens) != (store.documents, store.tokens):
        rule = (
            f"describes another store, of {counted(found.documents, 'document')} and {counted(found.tokens, 'token')}"
        )
        raise InputError(f"{path}: {rule}; {inspect} --describe writes it anew")
    if found.trained_tokens is not None and store.mask is None:
        rule = f"says which tokens are trained is in {mask_file(store.prefix).name}, which is not there"
        raise InputError(f"{path}: {rule}; copy that file too, or, to train all tokens, use {inspect} --describe")
    if found.fingerprint != store.fingerprint():
        names = listing([Path(file.name).suffix for file in store.files], "and")
        rule = f"does not fit {names} any more: one of them has changed since they were written"
        fix = f"copy all of them again, or, if {inspect} --verify finds nothing wrong, use --describe"
        raise InputError(f"{path}: {rule}; {fix}")
    if found.end_of_document is not None and store.documents:
        numbers = np.unique(np.linspace(0, store.documents - 1, sampled, dtype=np.int64)).tolist()
        bounds = {number: store.bounds(number) for number in numbers}
        ends = {number: end - 1 for number, (start, end) in bounds.items() if end > start}
        for number, last in zip(ends, store.read_from([*ends.values()], 1), strict=True):
            if last[0] != found.end_of_document:
                rule = f"says that documents end with token {found.end_of_document}"
                raise InputError(f"{path}: {rule}, but document {number} of the .idx ends with {last[0]}")
    return found


def _know(store: TokenStore, scans: Scans, tick: Callable[[], None]) -> Known:
    description = checked_description(store)
    if description is not None:
        found = description.largest_id, description.end_of_document, description.trained_tokens
        return Known(Scan(*found), description)
    return Known(scans.of(store, tick), None)


def _end_of_document(data: Data, known: dict[str, Known], tokenizer: Tokenizer | None) -> int | None:
    """The configured id, or else that of the stores, or else, with `data.mask_documents`, that of the tokenizer."""
    if data.end_of_document is not None:
        return data.end_of_document
    described = (found.description.end_of_document for found in known.values() if found.description is not None)
    told = next((end for end in described if end is not None), None)
    return tokenizer.eod if told is None and tokenizer is not None and data.mask_documents else told


def _tokenizer_problems(data: Data, tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[Problem]:
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        rule = f"has {tokenizer.vocab_size:,} tokens, more than model.vocab_size = {vocab_size:,}"
        yield Problem("data.tokenizer", rule, f"use model.vocab_size={tokenizer.vocab_size} or more", data.tokenizer)


def _end_problems(data: Data, end: int | None, stores: dict[str, TokenStore], vocab_size: int) -> Iterator[Problem]:
    unmarked = [store.index.file.name for store in stores.values() if store.documents <= 1]
    if data.mask_documents and end is None and unmarked:
        rule = f"{unmarked[0]} tells of no documents, and which token ends one is not known"
        yield Problem("data.mask_documents", rule, "set data.end_of_document to its id, or data.tokenizer", True)
    if data.mask_documents and end is not None and end >= vocab_size:
        rule = f"the end-of-document token {end} is outside model.vocab_size = {vocab_size}"
        yield Problem("data.mask_documents", rule, "was the store made with another tokenizer?", True)


def _problems(key: str, store: TokenStore, known: Known, data: Data, vocab_size: int) -> Iterator[Problem]:
    """Yield the reasons why a store cannot be trained on."""
    path, largest, description = store.prefix, known.scan.largest_id, known.description
    if largest >= vocab_size:
        rule = f"{store.bin.name} holds token id {largest}, outside model.vocab_size = {vocab_size}"
        yield Problem(key, rule, f"use model.vocab_size={largest + 1} or more; was another tokenizer meant?", path)
    if store.mask is not None and known.scan.trained_tokens == 0:
        yield Problem(
            key, f"{store.mask.file.name} says that no token is trained", "prepare the data anew, or leave it out", path
        )
    if description is None:
        return
    made_with, end = description.tokenizer, description.end_of_document
    if data.tokenizer is not None and made_with is not None and tokenizer_hash(data.tokenizer) != made_with.sha256:
        rule = f"was made with another tokenizer, {made_with.file}, than data.tokenizer = {data.tokenizer}"
        yield Problem(key, rule, f"use the tokenizer whose SHA-256 begins with {made_with.sha256[:12]}", path)
    if data.end_of_document is not None and end is not None and end != data.end_of_document:
        rule = f"its documents end with token {end}, not with data.end_of_document = {data.end_of_document}"
        yield Problem(key, rule, "use null there: the store knows its own", path)


def _cut_warnings(known: dict[str, Known], sequence_length: int) -> Iterator[str]:
    for path, found in known.items():
        packed = None if found.description is None else found.description.packed
        if packed is not None and sequence_length % packed:
            rule = f"was packed for sequences of {packed} tokens, so that none cuts a document"
            yield f"{path}: {rule}; model.sequence_length = {sequence_length}, no multiple of that, cuts some"


def _warnings(data: Data, end: int | None, stores: dict[str, TokenStore], known: dict[str, Known]) -> Iterator[str]:
    """Doubts about documents, where training looks at them."""
    for path, store in stores.items():
        theirs = known[path].scan.end_of_document
        if not data.mask_documents or end is None or theirs == end or not store.tokens:
            continue
        if store.documents > 1:
            found = "with several tokens" if theirs is None else f"with token {theirs}"
            taken = f"where they begin is taken from {store.index.file.name}"
            yield f"{path}: documents end {found}, not with {end}; {taken}"
        else:
            yield f"{path}: does not end with the end-of-document token {end}; is it the right one?"


class _Telling:
    """Says on stderr how far a scan is, if it takes long."""

    def __init__(self, store: TokenStore, tick: Callable[[], None]) -> None:
        self.store, self.tick = store, tick
        self.done = 0  # tokens
        self.began = self.told = time.monotonic()

    def __call__(self, tokens: int) -> None:
        self.tick()
        self.done += tokens
        now = time.monotonic()
        if now - self.told >= NOTICE_INTERVAL:
            self.told = now
            left = (now - self.began) * (self.store.tokens - self.done) / self.done
            share = f"{self.done / self.store.tokens:.0%} done, {left:,.0f} s left"
            what = "once for its largest token id, which no .json tells"
            print(printable(f"megalite: reading {self.store.bin.name} {what}: {share}"), file=sys.stderr)
