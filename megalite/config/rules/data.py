"""Rules of the data section."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from megalite.base.errors import Problem
from megalite.config.remote import scheme_of
from megalite.config.schema import Data, Remote, Source

MAX_SOURCES = 1000
MIN_WEIGHT, MAX_WEIGHT = 1e-15, 1e15


def data_rules(data: Data, vocab_size: int) -> Iterator[Problem]:
    """Every broken rule of sources and documents."""
    yield from _sources("data.train", data.train)
    yield from _sources("data.valid", data.valid)
    yield from _documents(data, vocab_size)
    yield from _remote(data.remote)


def _documents(data: Data, vocab_size: int) -> Iterator[Problem]:
    end = data.end_of_document
    if data.reset_positions and not data.mask_documents:
        rule = "needs data.mask_documents = true, or tokens of different documents would share a position"
        yield Problem("data.reset_positions", rule, "set data.mask_documents=true", True)
    if end is not None and not 0 <= end < vocab_size:
        rule = f"must be a token id, from 0 to model.vocab_size − 1 = {vocab_size - 1}"
        yield Problem("data.end_of_document", rule, value=end)


def _remote(remote: Remote) -> Iterator[Problem]:
    if not remote.cache:
        yield Problem("data.remote.cache", "is empty", "name a folder on a local disk")


def _sources(key: str, sources: list[Source]) -> Iterator[Problem]:
    if len(sources) > MAX_SOURCES:
        rule = f"has {len(sources):,} sources, and {MAX_SOURCES:,} are the most: every rank opens the files of each"
        yield Problem(
            key, rule, "prepare several files as one store, or list stores as one: megalite-merge-data --list"
        )
    for i, source in enumerate(sources):
        if not source.path:
            yield Problem(f"{key}[{i}].path", "is missing", "give the prefix of a token store: PATH.bin and PATH.idx")
        if scheme_of(source.path) is not None and (set(source.path) & set("?#") or "@" in urlsplit(source.path).netloc):
            rule = "must have no query, fragment or password: it is the prefix of several URLs, and stands in records"
            yield Problem(f"{key}[{i}].path", rule, "leave it out; credentials come from the environment")
        if not MIN_WEIGHT <= source.weight <= MAX_WEIGHT:
            rule = f"must be from {MIN_WEIGHT} to {MAX_WEIGHT:g}: it is a share, relative to the other sources"
            yield Problem(f"{key}[{i}].weight", rule, "remove the source from the list to leave it out", source.weight)
