"""The files of a token store, opened on this machine or on a server."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalite.base.errors import InputError
from megalite.base.files import exists, is_file
from megalite.config.remote import scheme_of
from megalite.config.schema import Remote
from megalite.data.data_file import DataFile, LocalFile
from megalite.data.hashes import split_hashes
from megalite.data.mask import mask_file
from megalite.data.remote import find

PAIR = "a token store is the pair PREFIX.bin and PREFIX.idx, or a list of such pairs, PREFIX.shards"


class AbsentError(InputError):
    """Absence of a store: there is neither a `.bin` nor an `.idx`."""


@dataclass(frozen=True)
class StoreFiles:
    """The open files of one store."""

    bin: DataFile
    idx: LocalFile
    mask: DataFile | None
    description_prefix: str  # the description's path without its suffix: of the store, or of a local copy


def store_files(prefix: str | Path) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` of a store; the prefix may contain dots."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def open_files(prefix: str, remote: Remote) -> StoreFiles:
    """Open the files of the store `prefix`, a path or URL. Raises InputError if one is missing or cannot be read."""
    return _open_local(prefix) if scheme_of(prefix) is None else _open_remote(prefix, remote)


def _open_local(prefix: str) -> StoreFiles:
    tokens, index = store_files(prefix)
    missing = [path for path in (index, tokens) if not is_file(path)]
    if missing:
        kind = InputError if any(map(exists, (index, tokens))) else AbsentError
        raise kind(f"{missing[0]}: no such file; {PAIR}")
    mask = mask_file(prefix)
    masked = exists(mask, follow=False)
    if masked and not is_file(mask):
        raise InputError(f"{mask}: not a regular file; a mask beside a token store has one bit per token")
    try:
        return StoreFiles(LocalFile(tokens), LocalFile(index), LocalFile(mask) if masked else None, prefix)
    except OSError as error:
        raise InputError(f"{prefix}: cannot read the token store: {error}") from error


def _open_remote(prefix: str, remote: Remote) -> StoreFiles:
    index, tokens = (find(prefix + suffix, remote) for suffix in (".idx", ".bin"))
    if index is None or tokens is None:
        kind = AbsentError if index is tokens else InputError
        raise kind(f"{prefix}{'.idx' if index is None else '.bin'}: no such object; {PAIR}")
    mask, description, hashes = (find(prefix + suffix, remote) for suffix in (".mask", ".json", ".hashes"))
    if hashes is not None:
        files = [tokens, index] if mask is None else [tokens, index, mask]
        content = np.memmap(hashes.copied().path, "u1", "r")
        for file, its in zip(files, split_hashes(hashes.name, content, [each.size for each in files]), strict=True):
            file.hashes = its
    described = prefix if description is None else str(description.copied().path).removesuffix(".json")
    return StoreFiles(tokens, index.copied(), mask, described)
