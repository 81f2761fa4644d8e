"""The inputs of programs that make new stores of stores, and the writers of what they make."""

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.data.description import Description
from megalite.data.joined_store import JoinedStore, allow_open_files, at_once, open_store
from megalite.data.store_writer import StoreWriter
from megalite_tools.data.outputs import check_name

IN_HELP = "a store to read: a prefix or its URL, or the prefix of a list of shards; in this order"


def add_stores(parser: argparse.ArgumentParser, out_help: str) -> None:
    """Add the arguments OUT and IN."""
    parser.add_argument("out", metavar="OUT", help=out_help)
    parser.add_argument("inputs", metavar="IN", nargs="+", help=IN_HELP)


def open_joined(inputs: Sequence[str]) -> JoinedStore:
    """The documents of stores and lists, one after the other. Raises InputError."""
    allow_open_files("IN", len(inputs))
    return JoinedStore("IN", at_once(open_store, inputs))


def open_inputs(options: argparse.Namespace) -> JoinedStore:
    """The documents of all inputs of a program, whose indices are in order. Raises InputError."""
    check_name("OUT", options.out)
    store = open_joined(options.inputs)
    paths = [shard.prefix for shard in store.shards]
    if len(set(paths)) < len(paths):
        twice = next(path for at, path in enumerate(paths) if path in paths[:at])
        raise InputError(f"{twice}: is an input twice; a source's weight makes its documents come more often")
    for shard in store.shards:
        shard.index.verify()
    return store


def check_unpacked(store: JoinedStore, described: Description | None) -> None:
    """Raises InputError for a packed store, whose sequences would be cut elsewhere without some of its documents."""
    if described is not None and described.packed is not None:
        fix = f"begin with the store before packing, and end with megalite-merge-data --pack {described.packed}"
        raise InputError(f"{store.shards[0].prefix}: is packed, and some documents of it alone would not be; {fix}")


def writer_of(prefix: str, store: JoinedStore, described: Description | None, **given: Any) -> StoreWriter:
    """A writer of documents of `store`, with its type of token, mask and origin. given: other arguments."""
    if described is not None:
        given = {
            "end_of_document": described.end_of_document,
            "tokenizer": described.tokenizer,
            "sources": described.sources,
            "unlisted_sources": described.source_files - len(described.sources),
            "packed": described.packed,
        } | given
    return StoreWriter(prefix, store.dtype, **{"masked": store.mask is not None} | given)


def runs(kinds: NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Yield stretches of equal values: each with its first place, the one after its last, and the value."""
    ends = np.concatenate([[0], np.flatnonzero(np.diff(kinds)) + 1, [len(kinds)]])
    for first, last in pairwise(map(int, ends)):
        if first < last:
            yield first, last, bool(kinds[first])
