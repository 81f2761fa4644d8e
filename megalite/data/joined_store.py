"""Several token stores, read as the one that has their documents one after the other; nothing is copied."""

import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from megalite.base.errors import InputError, counted
from megalite.base.files import exists
from megalite.config.remote import scheme_of
from megalite.config.schema import Remote
from megalite.data.description import Description
from megalite.data.joined_files import MAX_THREADS, JoinedFile, JoinedMaskFile, join_indices
from megalite.data.remote import find
from megalite.data.shards import Shard, read_shards, shard_prefix, shards_file
from megalite.data.store import Scan, TokenStore
from megalite.data.store_files import AbsentError

FILES_OF_STORE, OTHER_FILES = 4, 256  # files that a process keeps open for a store, and for all else
UNKNOWN = "no known tokenizer"

_Result = TypeVar("_Result")


def open_store(prefix: str | Path, remote: Remote | None = None) -> TokenStore:
    """The store `prefix`, a path or URL: `PREFIX.bin` and `PREFIX.idx` or, without both, the list `PREFIX.shards`.

    Raises InputError if there is none, if a file is damaged, or if the shards of a list are not of one kind.
    """
    prefix, remote = str(prefix), remote or Remote()
    try:
        return TokenStore(prefix, remote)
    except AbsentError:
        path = _list_file(prefix, remote)
        if path is None:
            raise
    shards = read_shards(path)
    allow_open_files(f"{prefix}.shards", len(shards))
    return JoinedStore(prefix, at_once(partial(_open_shard, prefix, remote), shards))


class JoinedStore(TokenStore):
    """The documents of `stores`, one after the other. `prefix` is its name in messages.

    Raises InputError, with the names, unless all have tokens of one type, the same tokenizer, and all or none a mask,
    and for stores that are packed, of which each ends with a token more than its sequences have.
    """

    def __init__(self, prefix: str, stores: Sequence[TokenStore]) -> None:
        self._shards = tuple(shard for store in stores for shard in store.shards)
        described = [Description.read(shard.description_prefix) for shard in self._shards]
        _check_alike(self._shards, described)
        masks = [shard.mask for shard in self._shards if shard.mask is not None]
        self.description_prefix = prefix
        self._assemble(
            prefix,
            JoinedFile(f"{prefix}.bin of shards", [shard.bin for shard in self._shards]),
            join_indices(f"{prefix}.idx of shards", [shard.index for shard in self._shards]),
            JoinedMaskFile(f"{prefix}.mask of shards", masks) if masks else None,
        )

    @property
    def shards(self) -> tuple[TokenStore, ...]:
        """The stores whose documents these are, one after the other."""
        return self._shards

    def verify(self, vocab_size: int | None = None, advanced: Callable[[int], None] = lambda _: None) -> Scan:
        """Read everything, as `TokenStore.verify` does; an error names the file of the shard."""
        scans = [shard.verify(vocab_size, advanced) for shard in self._shards]
        ends = {scan.end_of_document for scan in scans if scan.largest_id >= 0}
        trained = [scan.trained_tokens for scan in scans if scan.trained_tokens is not None]
        return Scan(
            max(scan.largest_id for scan in scans),
            ends.pop() if len(ends) == 1 else None,
            sum(trained) if trained else None,
        )


def at_once(function: Callable[..., _Result], items: Sequence[object]) -> list[_Result]:
    """The result of `function` for each item, made by several threads, which disks of a network and servers answer."""
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(MAX_THREADS, "shards") as threads:
        return list(threads.map(function, items))


def _list_file(prefix: str, remote: Remote) -> Path | None:
    """The list `prefix`, or a local copy of it; None: there is none."""
    if scheme_of(prefix) is None:
        return path if exists(path := shards_file(prefix)) else None
    found = find(f"{prefix}.shards", remote)
    return None if found is None else found.copied().path


def _open_shard(prefix: str, remote: Remote, shard: Shard) -> TokenStore:
    try:
        store = TokenStore(shard_prefix(prefix, shard), remote)
    except InputError as error:
        raise InputError(f"{prefix}.shards names a store that cannot be opened: {error}") from error
    if (store.documents, store.tokens) != (shard.documents, shard.tokens):
        told, found = (
            f"{counted(each.documents, 'document')} and {counted(each.tokens, 'token')}" for each in (shard, store)
        )
        fix = "put the store back that it was made for, or make the list anew with megalite-merge-data --list"
        raise InputError(f"{prefix}.shards: {shard.path} had {told}, and has {found}; {fix}")
    return store


def _check_alike(stores: Sequence[TokenStore], described: Sequence[Description | None]) -> None:
    """Raises InputError if stores cannot be read as one."""
    for store, description in zip(stores, described, strict=True):
        packed = None if description is None else description.packed
        if packed is not None and len(stores) > 1:
            rule = "is packed, with one token more than its sequences have, which would shift those of stores after it"
            fix = f"leave packing to the end: megalite-merge-data --pack {packed} of stores that are not packed"
            raise InputError(f"{store.prefix}: {rule}; {fix}")
        for ours, theirs in zip(_kind(stores[0], described[0]), _kind(store, description), strict=True):
            if ours != theirs:
                rule = f"{stores[0].prefix} and {store.prefix} cannot be one store: they have {ours} and {theirs}"
                more = ", or tell it with megalite-inspect-data --tokenizer FILE --describe"
                raise InputError(f"{rule}; prepare both alike{more if UNKNOWN in (ours, theirs) else ''}")


def _kind(store: TokenStore, description: Description | None) -> tuple[str, str, str]:
    """Properties that all shards of a list have in common, in words."""
    tokenizer = None if description is None else description.tokenizer
    return (
        f"tokens of {store.dtype.name}",
        "no mask" if store.mask is None else "a mask",
        UNKNOWN if tokenizer is None else f"the tokenizer with SHA-256 {tokenizer.sha256}",
    )


def allow_open_files(name: str, stores: int) -> None:
    """Let this process open the files of so many stores more, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + FILES_OF_STORE * stores + OTHER_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        fix = "raise it (ulimit -Hn), or make fewer stores of them with megalite-merge-data"
        raise InputError(f"{name}: {stores:,} stores need {needed:,} open files, and {hard:,} is the limit; {fix}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
