"""Writes a checkpoint of megalite, a folder of PyTorch Distributed Checkpoint, from weights of any format.

The checkpoint holds weights only: no optimizer, no progress. A run begins from it with `checkpoint.weights`.
"""

import pickle
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megalite.checkpoint.disk import File
from megalite.checkpoint.files import METADATA
from megalite.checkpoint.formats.opened import PREFIX, Weights
from megalite.checkpoint.formats.output import Output, Plan, Put, Stream, Written
from megalite.checkpoint.formats.torch_file import Planned, write_torch
from megalite.checkpoint.index import Chunk, Index
from megalite.checkpoint.manifest import INDEX, MANIFEST, NAME, Manifest, is_plain, step_of
from megalite.checkpoint.maps.strips import stacked
from megalite.config.convert import to_plain
from megalite.config.schema import Config
from megalite.plan.weights import Weight, weights

Tensors = Sequence[tuple[str, Weight, str]]  # name, form and data type


def plan(found: Weights, target: Path, dtype: str | None, files: int) -> Plan:
    """A checkpoint in about so many files of equal size; dtype: of all tensors, None: each keeps its own."""
    kinds = {name: dtype or found.index.tensors[PREFIX + name].dtype for name in weights(found.model)}
    shares: list[list[tuple[str, Weight, str]]] = [[] for _ in range(files)]
    loads = [0] * files
    for name, weight in sorted(weights(found.model).items(), key=lambda item: -item[1].elements):
        least = loads.index(min(loads))
        loads[least] += weight.elements
        shares[least].append((name, weight, kinds[name]))
    outputs = [
        Output(f"__{number}_0.distcp", load, partial(_write, share))
        for number, (share, load) in enumerate(zip(shares, loads, strict=True))
        if share
    ]
    tensors = [tensor for share in shares for tensor in share]
    copies = {path.name: path for path in found.companions if is_plain(path.name)}
    return Plan(tuple(outputs), copies=copies, finish=partial(_finish, found, target, tensors))


def _write(tensors: Tensors, stream: Stream, put: Put) -> list[list[Any]]:
    """Write a file of tensors. Returns of each: name, start and length of its archive, position of its elements."""
    places = []
    for name, weight, dtype in tensors:
        start = stream.tell()
        ((position, _),) = write_torch(stream, Planned(stacked([(name, weight)]), dtype), put)
        places.append([name, start, stream.tell() - start, position])
    return places


def _finish(found: Weights, target: Path, tensors: Tensors, written: Mapping[str, Written]) -> dict[str, bytes]:
    """The indexes and the manifest."""
    places = {name: (file, *at) for file, each in written.items() for name, *at in each.note or ()}
    chunks: list[Chunk] = []
    described: dict[str, Any] = {}
    stored = {}
    for name, weight, dtype in tensors:
        file, start, length, position = places[name]
        key, origin, sizes = PREFIX + name, torch.Size([0] * len(weight.shape)), torch.Size(weight.shape)
        chunks.append(Chunk(key, dtype, weight.shape, file, position, origin, sizes))
        properties = TensorProperties(getattr(torch, dtype))
        described[key] = TensorStorageMetadata(properties, sizes, [ChunkStorageMetadata(origin, sizes)])
        stored[MetadataIndex(key, origin)] = _StorageInfo(file, start, length)
    small = {
        INDEX: Index.of(chunks).encode(),
        METADATA: pickle.dumps(Metadata(described, storage_data=stored)),
    }
    hashes = {name: File(len(content), xxhash.xxh3_128_hexdigest(content)) for name, content in small.items()}
    manifest = Manifest(
        step=step_of(target) if NAME.fullmatch(target.absolute().name) else 0,
        tokens=None,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks=None,
        layout=None,
        versions={name: version(name) for name in ("megalite", "torch")},
        config=to_plain(Config(model=found.model)),
        data=(),
        files={name: each.file for name, each in written.items()} | hashes,
    )
    return {**small, MANIFEST: manifest.render().encode()}
