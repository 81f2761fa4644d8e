"""Lists of token stores that are read as one: `PREFIX.shards`, in place of `PREFIX.bin` and `PREFIX.idx`.

The file is JSON: `{"format": "megalite-shards", "version": 1, "shards": [{"path": …, "documents": …, "tokens": …}]}`.
The documents are those of the shards, one after the other. A path is the prefix of a store, relative to the folder of
the list, so that both can be moved or uploaded together.
"""

import os
import posixpath
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import as_json, read_object, write_new
from megalite.base.json_shape import ValueKind, misfits, whole
from megalite.config.remote import scheme_of
from megalite.data.description import COUNT, MAX_TEXT_LENGTH

FORMAT, VERSION = "megalite-shards", 1
MAX_SHARDS = 10_000  # every process that reads the data opens the files of each
MAX_LIST_BYTES = 64 << 20
RELATIVE_PATH = ValueKind(
    f"a path of 1 to {MAX_TEXT_LENGTH:,} characters, relative to the list's folder",
    lambda value: (
        isinstance(value, str) and 0 < len(value) <= MAX_TEXT_LENGTH and value[0] != "/" and scheme_of(value) is None
    ),
)
SHAPE = {
    "format": ValueKind(f"{FORMAT!r}", lambda value: value == FORMAT),
    "version": whole(0, 31),
    "shards": [{"path": RELATIVE_PATH, "documents": COUNT, "tokens": COUNT}],
}


@dataclass(frozen=True)
class Shard:
    """One store of a list."""

    path: str  # its prefix, relative to the folder of the list
    documents: int
    tokens: int


def shards_file(prefix: str | Path) -> Path:
    """The path of a list."""
    return Path(f"{prefix}.shards")


def relative_path(store: str | Path, prefix: str | Path) -> str:
    """The path of a local store in the list `prefix`."""
    return os.path.relpath(store, os.path.dirname(prefix) or ".")


def shard_prefix(prefix: str, shard: Shard) -> str:
    """The path or URL of a shard's store. Raises InputError for one outside of the list's bucket or server."""
    if scheme_of(prefix) is None:
        return os.path.join(os.path.dirname(prefix), shard.path)
    scheme, _, rest = prefix.partition("://")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(rest), shard.path))
    if place.split("/")[0] != rest.split("/")[0]:
        raise InputError(f"{prefix}.shards: the shard {shard.path} lies outside of {scheme}://{rest.split('/')[0]}")
    return f"{scheme}://{place}"


def write_shards(prefix: str | Path, shards: Sequence[Shard]) -> None:
    """Write the list of shards `prefix`, whole or not at all. Raises InputError if it, or a store there, exists."""
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), shards_file(prefix)):
        if os.path.lexists(path):
            raise InputError(f"{path}: exists already; remove it or choose another name")
    content = {"format": FORMAT, "version": VERSION, "shards": [asdict(shard) for shard in shards]}
    _check(shards_file(prefix), content)
    write_new(shards_file(prefix), as_json(content))


def read_shards(path: Path) -> tuple[Shard, ...]:
    """The shards in the list at `path`. Raises InputError if it is not one."""
    content = read_object(path, MAX_LIST_BYTES)
    _check(path, content)
    return tuple(Shard(**shard) for shard in content["shards"])


def _check(path: Path, content: dict[str, Any]) -> None:
    wrong = next(misfits(content, SHAPE, str(path)), None)
    if wrong is not None:
        raise InputError(f"{wrong}; the file is no list of shards, is damaged, or was changed by hand")
    if content["version"] != VERSION:
        raise InputError(f"{path}: has version {content['version']}; this megalite reads version {VERSION}")
    paths = [posixpath.normpath(shard["path"]) for shard in content["shards"]]
    if not 0 < len(paths) <= MAX_SHARDS:
        rule = f"lists {len(paths):,} shards, and 1 to {MAX_SHARDS:,} are possible"
        raise InputError(f"{path}: {rule}; megalite-merge-data makes one store of several")
    if len(set(paths)) < len(paths):
        twice = next(each for at, each in enumerate(paths) if each in paths[:at])
        raise InputError(f"{path}: lists {twice} twice; a source's weight makes its documents come more often")
