"""Makes an index of any folder that PyTorch Distributed Checkpoint (DCP) has written, without running its pickles.

DCP's own index is a pickle, and `torch.save` wraps every tensor in one. Both are read as data only. Every part of a
tensor is looked up in its file, so that our index describes what is really there.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

from megalite.checkpoint.store.archive import Archive
from megalite.checkpoint.store.disk import damage_of, opened, read_whole
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.index import Chunk, Index, check_form
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, is_plain
from megalite.checkpoint.weights.formats.inert_pickle import Made, read_pickle
from megalite.checkpoint.weights.formats.torch_read import dictionary, located, sizes, torch_damage

MAX_INDEX_BYTES = 1 << 28  # bytes of DCP's index
RESERVED_FILES = (METADATA, INDEX, MANIFEST)  # files that hold no tensor


class IndexedPart(NamedTuple):
    """A part of a tensor, as described by DCP's index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # byte of the file at which torch.save's bytes begin
    length: int


Names = Collection[Any]


def dcp_index(path: Path, choose: Callable[[Names], Names] = lambda names: names) -> tuple[Index, list[str]]:
    """The index of tensors in the folder `path`, and the names of entries that are no tensors.

    choose: returns which of all tensors' names are wanted. Raises DamagedError if a file is not as DCP writes it, or
    has elements in another order.
    """
    with torch_damage(path, METADATA):
        fields = _state(read_pickle(read_whole(path, METADATA, MAX_INDEX_BYTES)), "metadata.Metadata")
        entries, locations = (
            dictionary(fields["state_dict_metadata"]),
            dict(_locations(dictionary(fields["storage_data"]))),
        )
        tensors = {name: entry for name, entry in entries.items() if not _is(entry, "metadata.BytesStorageMetadata")}
        parts = [part for name in choose(tensors) for part in _parts(name, tensors[name], locations)]
    with damage_of(path, METADATA):
        index = Index.of(_chunks(path, parts))
    return index, [shortened(name) for name in entries if name not in tensors]


def _locations(storage_data: dict[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The location of every part, with its `_key`."""
    for key, location in storage_data.items():
        found = _state(key, "metadata.MetadataIndex")
        if found.get("offset") is not None:  # otherwise it is no tensor
            yield _key(_text(found["fqn"]), sizes(found["offset"])), _state(location, "filesystem._StorageInfo")


def _key(name: str, offsets: tuple[int, ...]) -> str:
    """The key of a part. It is a string, as tuples of numbers could be chosen to have equal hashes."""
    return f"{name} {offsets}"


def _parts(name: Any, entry: Any, locations: dict[str, dict[str, Any]]) -> Iterator[IndexedPart]:
    """The parts of a tensor, each taken from `locations`."""
    fields = _state(entry, "metadata.TensorStorageMetadata")
    properties, shape = fields["properties"], sizes(fields["size"])
    if not _is(properties, "metadata.TensorProperties") or not isinstance(properties.state, tuple):
        raise ValueError(f"has no properties of {shortened(name)}")
    dtype = properties.state[0].name.removeprefix("torch.")
    check_form(name, dtype, shape)
    for chunk in fields["chunks"]:
        at = _state(chunk, "metadata.ChunkStorageMetadata")
        offsets, extent = sizes(at["offsets"]), sizes(at["sizes"])
        location = locations.pop(_key(name, offsets))
        if location.get("transform_descriptors"):
            raise ValueError(f"has {name} transformed, compressed for example")
        file, start, length = _text(location["relative_path"]), *sizes((location["offset"], location["length"]))
        if not is_plain(file) or file.lower() in RESERVED_FILES:
            raise ValueError(f"places {name} in {shortened(file)}, which is no file of tensors in its folder")
        yield IndexedPart(name, dtype, shape, offsets, extent, file, start, length)


def _chunks(path: Path, parts: Iterable[IndexedPart]) -> Iterator[Chunk]:
    """The positions of the elements of `parts`, looked up in the files themselves."""
    for file, group in groupby(sorted(parts, key=attrgetter("file", "start")), attrgetter("file")):
        with opened(path, file) as descriptor, torch_damage(path, file):
            end = 0
            for part in group:
                if part.start < end:
                    raise ValueError(f"has {part.name} in bytes of another part, as {METADATA} tells")
                end = part.start + part.length
                position = 0 if 0 in part.sizes else _position(descriptor, part)
                yield Chunk(part.name, part.dtype, part.shape, file, position, part.offsets, part.sizes)


def _position(descriptor: int, part: IndexedPart) -> int:
    """The position of a part's first element. Raises ValueError unless all follow it, the last dimension fastest."""
    archive = Archive(descriptor, part.start, part.length)
    dtype, shape, position = located(archive, read_pickle(archive.read("data.pkl")), part.name)
    if (dtype, shape) != (part.dtype, part.sizes):
        raise ValueError(f"holds another dtype or shape of {part.name} than {METADATA} tells")
    return position


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.name == f"torch.distributed.checkpoint.{name}"


def _state(value: Any, name: str) -> dict[str, Any]:
    if not _is(value, name):
        raise ValueError(f"has something else in place of {name}")
    return dictionary(value.state)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("has something else in place of a name")
    return value
