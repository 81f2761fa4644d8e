"""Megatron-LM's `torch_dist`: PyTorch Distributed Checkpoint (DCP), with what is no tensor in `common.pt`.

Tensors are whole, and those of all layers lie one upon another, or else every layer has its own. So the layout of ranks
does not matter, and what we write can be loaded in any.
"""

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from reprlib import repr as shortened

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megalite.checkpoint.disk import damage_of, opened, read_whole
from megalite.checkpoint.files import METADATA
from megalite.checkpoint.formats.beside import beside, copies
from megalite.checkpoint.formats.dcp_index import dcp_index
from megalite.checkpoint.formats.megatron_folder import (
    RELEASE,
    TRACKER,
    VERSION,
    arguments_in,
    counts_in,
    latest,
    told_model,
)
from megalite.checkpoint.formats.megatron_write import pickled, saved_arguments
from megalite.checkpoint.formats.opened import PREFIX, Weights, refuse_differences
from megalite.checkpoint.formats.output import Note, Output, Plan, Put, Stream, Written
from megalite.checkpoint.formats.torch_file import Planned, write_torch
from megalite.checkpoint.formats.torch_read import Saved
from megalite.checkpoint.index import ITEM_BYTES, Index, Stored
from megalite.checkpoint.maps.megatron import (
    EMBEDDING,
    FC1,
    LAYER,
    LAYERS,
    QKV,
    WHOLE_MODEL,
    Split,
    check_split,
    chunk_table,
    known_as,
    padded,
    stacked_table,
)
from megalite.checkpoint.maps.strips import Table, Theirs, under_our_names
from megalite.config.bounded import parse
from megalite.config.files import is_file
from megalite.config.schema import Model
from megalite.plan.weights import weights

COMMON, BACKEND = "common.pt", "metadata.json"
BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
BACKENDS_SAVED = {**BACKENDS, "common_backend": "torch", "common_backend_version": 1}
NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")  # begin names of other tensors
MASTER = "optimizer.state.fp32_param."
STATES = {  # begin names of theirs, and of ours
    "": PREFIX,
    MASTER: PREFIX,
    "optimizer.state.exp_avg.": "optimizer.exp_avg.",
    "optimizer.state.exp_avg_sq.": "optimizer.exp_avg_sq.",
}
FILE_BYTES = 1 << 32  # of a file that we write, about
WITH_STATES = (QKV, "self_attention.linear_proj", "self_attention.core_attention", FC1, "mlp.linear_fc2")


@dataclass(frozen=True)
class Part:
    """A part of a tensor that is written."""

    name: str
    theirs: Theirs  # of this part
    offsets: tuple[int, ...]


def open_folder(path: Path, model: Model | None = None, states: bool = False) -> Weights:
    """The weights in a folder; `model` is theirs, where their arguments do not tell it.

    states: whether the optimizer's are wanted, too. Weights are those that it updates, in float32, where they were
    saved. Raises InputError for a model that megalite lacks, and DamagedError where files are not whole.
    """
    folder = latest(path)
    _check_backend(path, folder)
    content = Saved(path, folder + COMMON).content if is_file(path / folder / COMMON) else None
    model = told_model(path, folder + COMMON, arguments_in(content), model)
    raw, _ = dcp_index(path / folder, partial(_wanted, states))
    source = folder + METADATA
    with damage_of(path, source):
        files = tuple(folder + file for file in raw.files)
        found = _by_kind(raw)
        table = _table(model, found[""])
        indexes = {}
        for kind, prefix in STATES.items():
            tensors = found.get(kind, {})
            here = {name: theirs for name, theirs in table.items() if name in tensors or kind != MASTER}
            if tensors or not kind:
                refuse_differences(path, source, [kind + name for name in tensors], [kind + name for name in here])
                indexes[kind] = under_our_names(Index(files, tensors), here, weights(model), prefix)
        index = _joined(list(indexes.values()))
    return Weights("megatron-dist", path, model, index, _sizes(path, index.files), source, True, *beside(path))


def counts(path: Path) -> tuple[int, int]:
    """The updates that the run which saved had made, and the samples that it had seen; 0 where they are not told."""
    name = latest(path) + COMMON
    return counts_in(Saved(path, name).content) if is_file(path / name) else (0, 0)


def _wanted(states: bool, name: str) -> bool:
    kind = next((kind for kind in STATES if kind and name.startswith(kind)), "")
    if kind:
        return states
    return not name.startswith(NO_WEIGHTS) and known_as(name) is not None


def _by_kind(raw: Index) -> dict[str, dict[str, Stored]]:
    """The tensors by their names here, apart for weights, under an empty name, and every kind of states."""
    found: dict[str, dict[str, Stored]] = {"": {}}
    for name, stored in raw.tensors.items():
        kind = next((kind for kind in STATES if kind and name.startswith(kind)), "")
        known = known_as(name.removeprefix(kind))
        if known is None or known in found.setdefault(kind, {}):
            raise ValueError(f"has {name} twice, in two spellings" if known else f"has {name}, which is no weight")
        found[kind][known] = stored
    return found


def _joined(indexes: Sequence[Index]) -> Index:
    """One index. Of tensors in several, the last is taken."""
    files = tuple(dict.fromkeys(file for index in indexes for file in index.files))
    tensors: dict[str, Stored] = {}
    for index in indexes:
        numbers = np.array([files.index(file) for file in index.files], np.int64)
        for name, stored in index.tensors.items():
            rows = stored.rows.copy()
            rows[:, 0] = numbers[rows[:, 0]]
            tensors[name] = replace(stored, rows=rows)
    return Index(files, tensors)


def _check_backend(path: Path, folder: str) -> None:
    """Raises DamagedError unless the folder says that it is of this format."""
    with damage_of(path, folder + BACKEND):
        told = parse(read_whole(path, folder + BACKEND, 1 << 16, links=True))
        if not isinstance(told, dict):
            raise ValueError("holds something else than an object")
        for key, value in BACKENDS.items():
            if told.get(key) != value:
                found = shortened(told.get(key))
                raise ValueError(f"has the {key} {found} instead of {value!r}; save it by a Megatron that writes that")


def _table(model: Model, tensors: Mapping[str, Stored]) -> Table:
    """What the tensors are made of, stacked or layer by layer as they are."""
    embedding = tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding is not None and embedding.shape else 0
    if rows < model.vocab_size:
        raise ValueError(f"has {rows} rows of {EMBEDDING}, too few for a vocabulary of {model.vocab_size}")
    ours = weights(model)
    if any(name.startswith(LAYERS) and name.removeprefix(LAYERS)[:1].isdigit() for name in tensors):
        return chunk_table(model, ours, range(model.layers), rows, copy=False)
    return stacked_table(model, ours, rows)


def _sizes(path: Path, files: tuple[str, ...]) -> dict[str, int]:
    sizes = {}
    for file in files:
        with opened(path, file, links=True) as descriptor:
            sizes[file] = os.fstat(descriptor).st_size
    return sizes


def plan(found: Weights, split: Split = WHOLE_MODEL, dtype: str | None = None) -> Plan:
    """What a folder of the weights `found` holds, of `dtype`, or else of the one they have.

    split: only the padding of the vocabulary, and what the arguments say, depend on it.
    """
    model, dtype = found.model, dtype or found.dtype
    check_split(model, split)
    size = padded(model.vocab_size, split.tp)
    arguments = saved_arguments(model, split, size, dtype)
    table = stacked_table(model, weights(model), size)
    files = _files(_parts(model, size), dtype)
    outputs = tuple(_output(f"{RELEASE}/__{number}_0.distcp", parts, dtype) for number, parts in enumerate(files))
    empty = f"__{len(files)}_0.distcp"  # the state of all modules that may ask for one, which is none

    def finish(written: Mapping[str, Written]) -> dict[str, bytes]:
        notes = {name.removeprefix(f"{RELEASE}/"): file.note for name, file in written.items() if file.note}
        states = dict.fromkeys(_extra_states(model), _StorageInfo(empty, 0, written[f"{RELEASE}/{empty}"].file.bytes))
        return {f"{RELEASE}/{METADATA}": _metadata(table, dtype, notes, states)}

    texts = {
        TRACKER: f"{RELEASE}\n".encode(),
        f"{RELEASE}/{COMMON}": pickled({"args": arguments, "checkpoint_version": VERSION, "iteration": 0}),
        f"{RELEASE}/{BACKEND}": json.dumps(BACKENDS_SAVED).encode(),
        f"{RELEASE}/{empty}": pickled([None]),
    }
    return Plan(outputs, texts, copies(found), finish)


def _parts(model: Model, size: int) -> Iterator[Part]:
    """What is written, in order: all tensors, of stacked ones every layer's part."""
    for name, theirs in chunk_table(model, weights(model), range(model.layers), size, copy=False).items():
        shape = theirs.shape
        if (found := LAYER.fullmatch(name)) is None:
            yield Part(name, theirs, (0,) * len(shape))
        else:
            number = int(name.removeprefix(LAYERS).partition(".")[0])
            yield Part(LAYERS + found[2], replace(theirs, shape=(1, *shape)), (number, *[0] * len(shape)))


def _files(parts: Iterable[Part], dtype: str) -> list[list[Part]]:
    """The parts of every file."""
    files: list[list[Part]] = [[]]
    room = FILE_BYTES
    for part in parts:
        taken = part.theirs.elements * ITEM_BYTES[dtype]
        if files[-1] and taken > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(part)
        room -= taken
    return files


def _output(name: str, parts: Sequence[Part], dtype: str) -> Output:
    def write(stream: Stream, put: Put) -> list[Note]:
        notes = []
        for part in parts:
            start = stream.tell()
            write_torch(stream, Planned(part.theirs, dtype), put)
            notes.append([part.name, part.offsets, part.theirs.shape, start, stream.tell() - start])
        return notes

    return Output(name, sum(part.theirs.elements for part in parts), write)


def _extra_states(model: Model) -> Iterator[str]:
    """The names of states that modules may ask for: Megatron loads no folder that lacks one."""
    names = (*WITH_STATES, *(("self_attention.q_layernorm", "self_attention.k_layernorm") if model.qk_norm else ()))
    for name, number in product(names, range(model.layers)):
        yield f"{LAYERS}{name}._extra_state/shard_{number}_{model.layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _metadata(table: Table, dtype: str, files: Mapping[str, Note], states: Mapping[str, _StorageInfo]) -> bytes:
    """The index of DCP."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in table}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, notes in files.items():
        for name, offsets, sizes, start, length in notes:
            places[MetadataIndex(name, torch.Size(offsets), len(chunks[name]))] = _StorageInfo(file, start, length)
            chunks[name].append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    kind = TensorProperties(dtype=getattr(torch, dtype))
    tensors = {
        name: TensorStorageMetadata(kind, torch.Size(theirs.shape), chunks[name]) for name, theirs in table.items()
    }
    places |= {MetadataIndex(name): place for name, place in states.items()}
    return pickle.dumps(Metadata({**tensors, **{name: BytesStorageMetadata() for name in states}}, None, places))
