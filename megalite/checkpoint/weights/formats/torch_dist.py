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
from typing import Any

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

from megalite.base.errors import InputError
from megalite.base.files import is_file
from megalite.base.json_bounds import parse
from megalite.checkpoint.store.disk import damage_of, opened, read_whole
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.index import Index, Stored
from megalite.checkpoint.weights.formats.beside import beside, taken_along
from megalite.checkpoint.weights.formats.dcp_index import Names, dcp_index
from megalite.checkpoint.weights.formats.megatron_folder import (
    RELEASE,
    TRACKER,
    VERSION,
    arguments_in,
    folder_of,
    latest,
    told_model,
)
from megalite.checkpoint.weights.formats.megatron_write import pickled, saved_arguments
from megalite.checkpoint.weights.formats.opened import Weights, refuse_differences
from megalite.checkpoint.weights.formats.output import Note, Output, OutputPlan, Put, Stream, Written
from megalite.checkpoint.weights.formats.torch_file import Planned, write_torch
from megalite.checkpoint.weights.formats.torch_read import Saved
from megalite.checkpoint.weights.maps.megatron import (
    EMBEDDING,
    FC1_NORM,
    LAYER,
    LAYERS,
    NORM_BEFORE_EXPERTS,
    WHOLE_MODEL,
    Split,
    alike,
    check_split,
    chunk_table,
    dist_table,
    known_as,
    padded,
    stacked_table,
)
from megalite.checkpoint.weights.maps.megatron_experts import STACKED
from megalite.checkpoint.weights.maps.megatron_extra_states import extra_states
from megalite.checkpoint.weights.maps.megatron_latent import FUSED_NORMS
from megalite.checkpoint.weights.maps.megatron_training import arguments_beside, content_of, training_of
from megalite.checkpoint.weights.maps.models import dtype_of, is_correction
from megalite.checkpoint.weights.maps.strips import PREFIX, Table, Theirs, under_our_names
from megalite.config.model_schema import Model
from megalite.plan.model.weights import weights

COMMON_FILE, BACKEND_FILE = "common.pt", "metadata.json"
BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
SAVED_BACKENDS = {**BACKENDS, "common_backend": "torch", "common_backend_version": 1}
OTHER_PREFIXES = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")  # begin names of other tensors
MASTERS = (
    "optimizer.state.fp32_param.",
    "optimizer.state.param.",
)  # weights as an optimizer or the distributed one has
# Parts of names that modules with Transformer Engine and without have, and optimizers and distributed ones.
SYNONYMS = ((NORM_BEFORE_EXPERTS, FC1_NORM), MASTERS)
MOMENTS = {f"optimizer.state.{name}.": f"optimizer.{name}." for name in ("exp_avg", "exp_avg_sq")}
KINDS = {**dict.fromkeys(("", *MASTERS), PREFIX), **MOMENTS}  # begin names of theirs, and of ours
STATE_DTYPE = "float32"  # data type of states
REPEATED = ((FC1_NORM, NORM_BEFORE_EXPERTS), *FUSED_NORMS.items())  # the first of names is left out if both are there
FILE_BYTES = 1 << 32  # bytes of a file that we write, about


@dataclass(frozen=True)
class OutputPart:
    """A part of a tensor that is written."""

    name: str
    theirs: Theirs  # tensor of this part
    offsets: tuple[int, ...]
    dtype: str


def open_folder(path: Path, model: Model | None = None, states: bool = False) -> Weights:
    """The weights in a folder; `model` is theirs, where their arguments do not tell it.

    states: whether the optimizer's are wanted, too. Weights are those that it updates, in float32, where they were
    saved. Raises InputError for a model that megalite lacks, and if there are no states, or none that belong to one
    weight each, and DamagedError where files are not whole.
    """
    folder = latest(path)
    _check_backend(path, folder)
    saved = Saved(path, folder + COMMON_FILE) if is_file(path / folder / COMMON_FILE) else None
    content = saved and saved.content
    arguments = arguments_in(content)
    model = told_model(path, folder + COMMON_FILE, arguments, model)
    names: set[Any] = set()  # names of all tensors
    raw, _ = dcp_index(path / folder, partial(_chosen, states, names))
    source = folder + METADATA
    trained = any(str(name).startswith(tuple(MOMENTS)) for name in names)
    training = None
    if states:
        _check_states(path, names, trained)
        if saved is None or not isinstance(content, dict):
            raise InputError(f"{path}: {folder}{COMMON_FILE} tells nothing of the run; leave --optimizer out")
        training = training_of(content, arguments or {}, model, f"{path}: {folder}{COMMON_FILE}", saved.whole)
    with damage_of(path, source):
        files = tuple(folder + file for file in raw.files)
        found = _by_kind(raw)
        table = _table(model, found[""])
        indexes = {}
        for kind, prefix in KINDS.items():
            tensors = {kind + name: tensor for name, tensor in found.get(kind, {}).items()}
            here = {kind + name: theirs for name, theirs in table.items() if _has(kind, theirs)}
            if kind in MASTERS:  # weights that an optimizer updates as they are have none
                here = {name: theirs for name, theirs in here.items() if name in tensors}
            if tensors or not kind:
                refuse_differences(path, source, list(tensors), list(here))
                indexes[kind] = under_our_names(Index(files, tensors), here, weights(model), prefix)
        index = _joined(list(indexes.values()))
    if training is not None:
        _check_types(path, index)
        if folder not in ("", f"{RELEASE}/", f"{folder_of(training.progress.step)}/"):
            raise InputError(
                f"{path}: {folder}{COMMON_FILE} is of iteration {training.progress.step}, not of its folder's"
            )
    family, companions = beside(path)
    return Weights(
        "megatron-dist",
        path,
        model,
        index,
        _sizes(path, index.files),
        source,
        family=family,
        companions=companions,
        trained=trained,
        training=training,
    )


def _chosen(states: bool, seen: set[Any], names: Names) -> list[Any]:
    """The names of weights, and with `states` of the optimizer's. Adds all names to `seen`."""
    seen.update(names)
    masters = next((kind for kind in MASTERS if any(name.startswith(kind) for name in names)), MASTERS[0])
    wanted = (masters, *MOMENTS)
    return [
        name
        for name in names
        if (states and name.startswith(wanted)) or (not name.startswith(OTHER_PREFIXES) and known_as(name) is not None)
        if not any(name != name.replace(*pair) and name.replace(*pair) in names for pair in REPEATED)
    ]


def _check_states(path: Path, names: Iterable[str], trained: bool) -> None:
    """Raises InputError if there are no states of an optimizer, or others than a moment of every weight."""
    others = sorted(name for name in names if name.startswith(("optimizer.", "chained_")) and not _kind(name))
    if not others:
        if not trained:
            raise InputError(f"{path}: holds no states of an optimizer; leave --optimizer out")
        for kind in MOMENTS:
            if not any(name.startswith(kind) for name in names):
                raise InputError(f"{path}: holds no {kind}*, without which AdamW cannot go on; leave --optimizer out")
        return
    raise InputError(
        f"{path}: holds {others[0]:.100}, which is no AdamW state of one weight; save by Megatron with "
        "--dist-ckpt-optim-fully-reshardable, or leave --optimizer out"
    )


def _check_types(path: Path, index: Index) -> None:
    """Raises InputError unless what the optimizer updates, and its states, are in float32."""
    for name, tensor in index.tensors.items():
        if tensor.dtype != STATE_DTYPE:
            why = (
                "its main weight, of optimizer.state.*, is missing"
                if name.startswith(PREFIX)
                else f"must be {STATE_DTYPE}"
            )
            raise InputError(f"{path}: has {name} in {tensor.dtype}: {why}; leave --optimizer out")


def _kind(name: str) -> str:
    """Return the one of KINDS that begins a tensor's name; empty if there is none."""
    return next((kind for kind in KINDS if kind and name.startswith(kind)), "")


def _by_kind(raw: Index) -> dict[str, dict[str, Stored]]:
    """The tensors by their names here, apart for weights, under an empty name, and every kind of states."""
    found: dict[str, dict[str, Stored]] = {"": {}}
    for name, stored in raw.tensors.items():
        kind = _kind(name)
        known = known_as(name.removeprefix(kind))
        if known is None or known in found.setdefault(kind, {}):
            raise ValueError(f"has {name} twice, in two spellings" if known else f"has {name}, which is no weight")
        found[kind][known] = stored
    return found


def _joined(indexes: Sequence[Index]) -> Index:
    """Join indexes into one. If a tensor is in several, the last is taken."""
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
    with damage_of(path, folder + BACKEND_FILE):
        told = parse(read_whole(path, folder + BACKEND_FILE, 1 << 16, links=True))
        if not isinstance(told, dict):
            raise ValueError("holds something else than an object")
        for key, value in BACKENDS.items():
            if told.get(key) != value:
                found = shortened(told.get(key))
                raise ValueError(f"has the {key} {found} instead of {value!r}; save it by a Megatron that writes that")


def _table(model: Model, tensors: Mapping[str, Stored]) -> Table:
    """Return how the tensors, stacked or layer by layer as they are, are made of our weights."""
    embedding = tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding is not None and embedding.shape else 0
    if rows < model.vocab_size:
        raise ValueError(f"has {rows} rows of {EMBEDDING}, too few for a vocabulary of {model.vocab_size}")
    _refuse_another_number(model, tensors)
    ours = weights(model)
    if any(name.startswith(LAYERS) and name.removeprefix(LAYERS)[:1].isdigit() for name in tensors):
        table = chunk_table(model, ours, range(model.layers), rows, copy=False)
    else:
        table = stacked_table(model, ours, rows)
    return {known_as(name) or name: theirs for name, theirs in table.items()}


def _refuse_another_number(model: Model, tensors: Mapping[str, Stored]) -> None:
    """Raises ValueError before a table is made of billions of experts that a wrong number means."""
    if model.experts is None:
        return
    there = next((list(stored.shape) for name, stored in tensors.items() if STACKED in name), [])
    if model.experts.count not in there:
        raise ValueError(f"has {there} of experts in a tensor instead of {model.experts.count:,}")


def _sizes(path: Path, files: tuple[str, ...]) -> dict[str, int]:
    sizes = {}
    for file in files:
        with opened(path, file, links=True) as descriptor:
            sizes[file] = os.fstat(descriptor).st_size
    return sizes


def plan(found: Weights, split: Split = WHOLE_MODEL, dtype: str | None = None) -> OutputPlan:
    """Plan a folder of the weights `found`, in `dtype`, or else in the one they have; states are in float32.

    split: only the padding of the vocabulary, and what the arguments say, depend on it.
    """
    model, dtype, training = found.model, dtype or found.dtype, found.training
    check_split(model, split)
    size = padded(model.vocab_size, split.tp)
    content: dict[str, Any] = {"args": saved_arguments(model, split, size, dtype), "checkpoint_version": VERSION}
    folder, kinds, tracked = RELEASE, {"": (PREFIX, dtype)}, RELEASE
    if training is None:
        content["iteration"] = 0
    else:
        _refuse_other_states(found)
        kinds |= {MASTERS[0]: (PREFIX, STATE_DTYPE)} | {theirs: (ours, STATE_DTYPE) for theirs, ours in MOMENTS.items()}
        vars(content["args"]).update(arguments_beside(training))
        content |= content_of(training)
        folder, tracked = folder_of(training.progress.step), str(training.progress.step)
    table = dist_table(model, weights(model), size)
    described = {
        kind + name: (theirs.shape, dtype_of(theirs.of, dtype))
        for kind, (_, dtype) in kinds.items()
        for name, theirs in table.items()
        if _has(kind, theirs)
    }
    files = _files(_parts(model, size, kinds))
    outputs = tuple(_output(f"{folder}/__{number}_0.distcp", parts) for number, parts in enumerate(files))
    empty = f"__{len(files)}_0.distcp"  # the state of all modules that may ask for one, which is none

    def finish(written: Mapping[str, Written]) -> dict[str, bytes]:
        notes = {name.removeprefix(f"{folder}/"): file.note for name, file in written.items() if file.note}
        states = dict.fromkeys(extra_states(model), _StorageInfo(empty, 0, written[f"{folder}/{empty}"].file.bytes))
        synonyms = SYNONYMS if model.attention.latent is None else (*SYNONYMS, *REPEATED)
        return {f"{folder}/{METADATA}": _metadata(described, notes, states, synonyms)}

    beside_them, copied = taken_along(found)
    texts = beside_them | {
        TRACKER: f"{tracked}\n".encode(),
        f"{folder}/{COMMON_FILE}": pickled(content),
        f"{folder}/{BACKEND_FILE}": json.dumps(SAVED_BACKENDS).encode(),
        f"{folder}/{empty}": pickled([None]),
    }
    return OutputPlan(outputs, texts, copied, finish)


def _refuse_other_states(found: Weights) -> None:
    """Raises InputError for states that are no moments of AdamW."""
    for name in found.index.tensors:
        if not name.startswith((PREFIX, *MOMENTS.values())):
            raise InputError(
                f"{found.path}: has {name}; Megatron's AdamW has no place for it, so leave --optimizer out"
            )


def _parts(model: Model, size: int, kinds: Mapping[str, tuple[str, str]]) -> Iterator[OutputPart]:
    """Yield all tensors in the order of writing, stacked ones as every layer's part, those of experts as each one's.

    kinds: by the beginning of the tensors' names: the beginning of our names, and the data type.
    """
    table = chunk_table(model, weights(model), range(model.layers), size, copy=False)
    for (kind, (ours, dtype)), (name, theirs) in product(kinds.items(), table.items()):
        if not _has(kind, theirs):
            continue
        parts = [((0,) * len(theirs.shape), replace(theirs, kind=ours))]
        if STACKED in name:
            parts = [((expert, 0, 0), replace(one, kind=ours)) for expert, one in enumerate(theirs.unpiled())]
        if (found := LAYER.fullmatch(name)) is not None and alike(model):
            name, number = LAYERS + found[2], int(name.removeprefix(LAYERS).partition(".")[0])
            parts = [((number, *place), replace(part, shape=(1, *part.shape))) for place, part in parts]
        yield from (OutputPart(kind + name, part, place, dtype_of(theirs.of, dtype)) for place, part in parts)


def _has(kind: str, theirs: Theirs) -> bool:
    """Return whether there is a tensor of this one of KINDS: no optimizer has states of corrections."""
    return not kind or not is_correction(theirs.of)


def _files(parts: Iterable[OutputPart]) -> list[list[OutputPart]]:
    """The parts of every file."""
    files: list[list[OutputPart]] = [[]]
    room = FILE_BYTES
    for part in parts:
        taken = part.theirs.bytes(part.dtype)
        if files[-1] and taken > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(part)
        room -= taken
    return files


def _output(name: str, parts: Sequence[OutputPart]) -> Output:
    def write(stream: Stream, put: Put) -> list[Note]:
        notes = []
        for part in parts:
            start = stream.tell()
            write_torch(stream, Planned(part.theirs, part.dtype), put)
            notes.append([part.name, part.offsets, part.theirs.shape, start, stream.tell() - start])
        return notes

    return Output(name, sum(part.theirs.bytes(part.dtype) for part in parts), write)


def _metadata(
    described: Mapping[str, tuple[tuple[int, ...], str]],
    files: Mapping[str, Note],
    states: Mapping[str, _StorageInfo],
    synonyms: Sequence[tuple[str, str]],
) -> bytes:
    """The index of DCP, of tensors given by shape and data type. Some are in it under both the names that they have."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in described}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, notes in files.items():
        for name, offsets, sizes, start, length in notes:
            places[MetadataIndex(name, torch.Size(offsets), len(chunks[name]))] = _StorageInfo(file, start, length)
            chunks[name].append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    tensors = {
        name: TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), chunks[name])
        for name, (shape, dtype) in described.items()
    }
    for one, other in synonyms:
        tensors |= {name.replace(one, other): kind for name, kind in tensors.items() if one in name}
        places |= {replace(at, fqn=at.fqn.replace(one, other)): place for at, place in places.items() if one in at.fqn}
    places |= {MetadataIndex(name): place for name, place in states.items()}
    return pickle.dumps(Metadata({**tensors, **{name: BytesStorageMetadata() for name in states}}, None, places))
