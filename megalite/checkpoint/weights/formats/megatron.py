"""Megatron-LM's older format: a file of every tensor- and pipeline-parallel rank, each a pickle with tensors.

`iter_0000010/mp_rank_TT_PPP/model_optim_rng.pt` holds a dictionary with the arguments, and under `model`, or under
`model0`, `model1` … of virtual stages, tensors whose layers are numbered from 0 in every one.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from megalite.base.errors import InputError, listing
from megalite.checkpoint.store.disk import DamagedError, damage_of
from megalite.checkpoint.store.index import Chunk, Index
from megalite.checkpoint.weights.formats.beside import beside, taken_along
from megalite.checkpoint.weights.formats.megatron_folder import (
    RELEASE,
    TRACKER,
    VERSION,
    arguments_in,
    latest,
    told_model,
)
from megalite.checkpoint.weights.formats.megatron_write import saved_arguments
from megalite.checkpoint.weights.formats.opened import Weights, refuse_differences
from megalite.checkpoint.weights.formats.output import Output, OutputPlan, Put, Stream
from megalite.checkpoint.weights.formats.torch_file import Planned, write_torch
from megalite.checkpoint.weights.formats.torch_read import Saved, is_tensor
from megalite.checkpoint.weights.maps.megatron import (
    EMBEDDING,
    OUTPUT,
    WHOLE_MODEL,
    Split,
    check_split,
    chunk_table,
    known_as,
    padded,
    places,
    replicated,
    uniform,
)
from megalite.checkpoint.weights.maps.megatron_experts import Share
from megalite.checkpoint.weights.maps.models import refuse_experts
from megalite.checkpoint.weights.maps.strips import PREFIX, Table, Theirs, under_our_names
from megalite.config.schema import Model
from megalite.plan.model.weights import weights

FILES = ("model_optim_rng.pt", "model_rng.pt")  # file of a rank: the latter with a distributed optimizer, long ago
RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?")
CHUNK = re.compile(r"model(\d{0,3})")
LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d{1,5})\.")
LISTED_LAYERS = 5  # names in a message
Ranks = dict[tuple[int, int], str]  # files by tensor-parallel and pipeline rank
Tensors = dict[str, Any]  # by name


def open_folder(path: Path, model: Model | None = None) -> Weights:
    """The weights in a folder; `model` is theirs, where their arguments do not tell it.

    Raises InputError for a model that megalite lacks, and DamagedError where files are not whole.
    """
    names, tp, pp = _ranks(path)
    saved = {rank: Saved(path, name) for rank, name in names.items()}
    source = names[0, 0]
    arguments = arguments_in(saved[0, 0].content)
    with damage_of(path, source):
        _check_version(saved[0, 0].content)
    model = told_model(path, source, arguments, model)
    refuse_experts(model, str(path))
    chunks = {rank: _chunks(file) for rank, file in saved.items()}
    table, found = _matched(path, model, saved, chunks, Split(tp, pp, len(chunks[0, 0])))
    with damage_of(path, source):
        index = under_our_names(Index.of(found), table, weights(model), PREFIX)
    sizes = {file.name: file.bytes for file in saved.values()}
    return Weights("megatron", path, model, index, sizes, source, True, *beside(path))


def _ranks(path: Path) -> tuple[Ranks, int, int]:
    """The files of all ranks, and how many there are of both kinds. Raises InputError and DamagedError."""
    folder = latest(path)
    names: Ranks = {}
    for place in sorted((path / folder).glob("mp_rank_*")):
        found = RANK.fullmatch(place.name)
        file = next((name for name in FILES if (place / name).is_file()), None)
        if found is None or file is None:
            rule = f"holds no {FILES[0]}" if found else "is no folder of a tensor- and a pipeline-parallel rank"
            raise DamagedError(path, f"{folder}{place.name} {rule}")
        names[int(found[1]), int(found[2] or 0)] = f"{folder}{place.name}/{file}"
    if not names:
        raise InputError(f"{path}: holds neither mp_rank_* folders nor a {TRACKER} that names a folder with some")
    tp, pp = (1 + max(rank[kind] for rank in names) for kind in (0, 1))
    for rank in product(range(tp), range(pp)):
        if rank not in names:
            some = f"{len(names)} of {tp} · {pp} ranks"
            raise DamagedError(path, f"{folder}{_name(*rank, pp)} is missing: there are {some}")
    return names, tp, pp


def _name(tensor: int, pipeline: int, pp: int) -> str:
    return f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pp > 1 else "")


def _check_version(content: Any) -> None:
    """Raises ValueError unless queries, keys and values are ordered as they are today."""
    if not isinstance(content, dict):
        raise ValueError("holds something else than a dictionary")
    if (version := content.get("checkpoint_version")) != VERSION:
        raise ValueError(
            f"has the checkpoint_version {shortened(version)} instead of {VERSION}; save it by a later Megatron"
        )


def _chunks(file: Saved) -> list[Tensors]:
    """The tensors of every virtual stage in a rank's file, by their names here. Raises DamagedError."""
    with damage_of(file.path, file.name):
        content = file.content if isinstance(file.content, dict) else {}
        keys = {key: found for key in content if isinstance(key, str) and (found := CHUNK.fullmatch(key))}
        order = ["model"] if list(keys) == ["model"] else [f"model{number}" for number in range(len(keys))]
        if not keys or set(keys) != set(order):
            raise ValueError(
                f"holds {listing(sorted(keys), 'and') or 'no model'} instead of model, or model0, model1 …"
            )
        return [_tensors(content[key]) for key in order]


def _tensors(model: Any) -> Tensors:
    found: Tensors = {}
    for name, value in _flat(model):
        known = known_as(name)
        if known is None:
            continue
        if known in found:
            raise ValueError(f"has {known} twice, once as {name}")
        if not is_tensor(value):
            raise ValueError(f"has {name}, which is no tensor")
        found[known] = value
    return found


def _flat(values: Any, prefix: str = "", depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield all values in nested dictionaries, by their joined keys."""
    if not isinstance(values, dict) or not depth:
        raise ValueError(f"has {prefix or 'a model'} that is no dictionary of tensors")
    for key, value in values.items():
        if not isinstance(key, str):
            raise ValueError("has tensors without names")
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.", depth - 1)
        else:
            yield prefix + key, value


def _matched(
    path: Path,
    model: Model,
    saved: Mapping[tuple[int, int], Saved],
    chunks: Mapping[tuple[int, int], list[Tensors]],
    split: Split,
) -> tuple[Table, list[Chunk]]:
    """Return how each tensor of all files is made of our weights, and where it lies, each once. Raises DamagedError."""
    layers = _layers(path, model, saved, chunks, split)
    ours, rows = weights(model), _vocabulary(saved, chunks)
    if rows < model.vocab_size:
        raise InputError(f"{path}: {EMBEDDING} has {rows} rows, too few for a vocabulary of {model.vocab_size}")
    table: dict[str, Theirs] = {}
    places: list[Chunk] = []
    for (tensor, pipeline), file in saved.items():
        for number, here in enumerate(chunks[tensor, pipeline]):
            wanted = chunk_table(model, ours, layers[pipeline, number], rows, Share(tensor, split.tp))
            refuse_differences(path, file.name, here, wanted)
            for chunk in file.chunks(here):
                theirs = wanted[chunk.name]
                if tuple(chunk.shape) != theirs.shape:
                    what = f"has {chunk.name} {list(chunk.shape)} instead of {list(theirs.shape)}"
                    raise DamagedError(path, f"{file.name} {what}")
                copy = chunk.name == OUTPUT and model.tie_embeddings
                if not copy and not (tensor and replicated(chunk.name)):
                    name = f"{file.name} {number} {chunk.name}"
                    places.append(chunk._replace(name=name))
                    table[name] = theirs
    return table, places


def _layers(
    path: Path,
    model: Model,
    saved: Mapping[tuple[int, int], Saved],
    chunks: Mapping[tuple[int, int], list[Tensors]],
    split: Split,
) -> dict[tuple[int, int], range]:
    """The layers of every pipeline rank's every chunk, as many as there are in the files of the first tensor rank."""
    found, first = {}, 0
    for pipeline, number, _ in places(split):
        if any(len(chunks[tensor, pipeline]) != split.virtual for tensor in range(split.tp)):
            raise DamagedError(path, f"{saved[0, pipeline].name} has another number of virtual stages than others")
        own = {int(match[1]) for name in chunks[0, pipeline][number] if (match := LAYER_NUMBER.match(name))}
        if own != set(range(len(own))):
            raise DamagedError(
                path, f"{saved[0, pipeline].name} has layers {sorted(own)[:LISTED_LAYERS]} instead of 0, 1 …"
            )
        found[pipeline, number] = range(first, first + len(own))
        first += len(own)
    if first != model.layers:
        raise DamagedError(path, f"has {first} layers in {len(found)} stages instead of {model.layers}")
    return found


def _vocabulary(saved: Mapping[tuple[int, int], Saved], chunks: Mapping[tuple[int, int], list[Tensors]]) -> int:
    """The size of the vocabulary with its padding, as the embedding has it."""
    rows = 0
    for (tensor, pipeline), file in saved.items():
        if pipeline == 0 and (value := chunks[tensor, 0][0].get(EMBEDDING)) is not None:
            (chunk,) = file.chunks({EMBEDDING: value})
            rows += chunk.shape[0] if len(chunk.shape) == 2 else 0
    return rows


def plan(found: Weights, split: Split = WHOLE_MODEL, dtype: str | None = None) -> OutputPlan:
    """Plan a folder of the weights `found`, divided by `split`, in `dtype`, or else in the one they have."""
    model, dtype = found.model, dtype or found.dtype
    check_split(model, split)
    refuse_experts(model, "Megatron's older format")
    size = padded(model.vocab_size, split.tp)
    arguments = saved_arguments(model, split, size, dtype)
    ours, layers = weights(model), uniform(model.layers, split)

    def output(tensor: int, pipeline: int) -> Output:
        tables = [
            chunk_table(model, ours, layers[pipeline, number], size, Share(tensor, split.tp))
            for number in range(split.virtual)
        ]
        models = [{name: Planned(theirs, dtype) for name, theirs in table.items()} for table in tables]
        keys = ["model"] if split.virtual == 1 else [f"model{number}" for number in range(split.virtual)]
        content = {
            "args": arguments,
            "checkpoint_version": VERSION,
            "iteration": 0,
            **dict(zip(keys, models, strict=True)),
        }

        def write(stream: Stream, put: Put) -> None:
            write_torch(stream, content, put, FILES[0].removesuffix(".pt"))

        size_here = sum(theirs.bytes(dtype) for table in tables for theirs in table.values())
        return Output(f"{RELEASE}/{_name(tensor, pipeline, split.pp)}/{FILES[0]}", size_here, write)

    outputs = tuple(output(*rank) for rank in product(range(split.tp), range(split.pp)))
    texts, copies = taken_along(found)
    return OutputPlan(outputs, texts | {TRACKER: f"{RELEASE}\n".encode()}, copies)
