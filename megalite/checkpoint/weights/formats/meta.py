"""Meta's original Llama: `params.json`, and `consolidated.NN.pth` of every tensor-parallel rank."""

import json
import re
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import read_object
from megalite.checkpoint.store.disk import DamagedError, damage_of
from megalite.checkpoint.store.index import Chunk, Index
from megalite.checkpoint.weights.formats.beside import beside, config_beside, taken_along
from megalite.checkpoint.weights.formats.opened import Weights, refuse_differences
from megalite.checkpoint.weights.formats.output import Output, OutputPlan, Put, Stream
from megalite.checkpoint.weights.formats.torch_file import Planned, write_torch
from megalite.checkpoint.weights.formats.torch_read import Saved, is_tensor
from megalite.checkpoint.weights.maps.meta import (
    EMBEDDING,
    OUTPUT,
    check_files,
    model_of,
    params_of,
    replicated,
    table_of,
)
from megalite.checkpoint.weights.maps.strips import PREFIX, Theirs, under_our_names
from megalite.config.model_schema import Model
from megalite.plan.model.weights import weights

PARAMS, FIRST_FILE = "params.json", "consolidated.00.pth"
FILE = re.compile(r"consolidated\.(\d{2,3})\.pth")
IGNORED_TENSOR = "rope.freqs"  # angles, in files of Llama 1 and 2
FFN_WEIGHT = "layers.0.feed_forward.w1.weight"  # tells the feed-forward's width
MAX_PARAMS_BYTES = 1 << 20  # bytes of params.json


def open_folder(path: Path, model: Model | None = None) -> Weights:
    """The weights in a folder; `model` is theirs, where neither params.json nor files taken along tell all of it.

    Raises InputError for a model that megalite lacks, and DamagedError where files are not whole.
    """
    files = [Saved(path, name) for name in _names(path)]
    found = [_chunks(file) for file in files]
    shapes = {name: tuple(chunk.shape) for name, chunk in found[0].items()}
    config = config_beside(path)
    if model is None:
        model = config[1] if config else _told_model(path, shapes, len(files))
    check_files(model, len(files))
    rows = shapes.get(EMBEDDING) == (model.vocab_size // len(files), model.width)
    table: dict[str, Theirs] = {}
    places: list[Chunk] = []
    for rank, (file, chunks) in enumerate(zip(files, found, strict=True)):
        wanted = table_of(model, rank, len(files), rows)
        if model.tie_embeddings and OUTPUT not in chunks:
            del wanted[OUTPUT]
        refuse_differences(path, file.name, chunks, wanted)
        for name, chunk in chunks.items():
            if tuple(chunk.shape) != wanted[name].shape:
                what = f"has {name} {list(chunk.shape)} instead of {list(wanted[name].shape)}"
                raise DamagedError(path, f"{file.name} {what}")
            copy = name == OUTPUT and model.tie_embeddings
            if not copy and not (rank and replicated(name)):
                places.append(chunk._replace(name=f"{file.name} {name}"))
                table[places[-1].name] = wanted[name]
    with damage_of(path, FIRST_FILE):
        index = under_our_names(Index.of(places), table, weights(model), PREFIX)
    sizes = {file.name: file.bytes for file in files}
    return Weights("meta", path, model, index, sizes, FIRST_FILE, True, *beside(path))


def _names(path: Path) -> list[str]:
    """The files, in order. Raises InputError if there are none, and DamagedError if one is missing."""
    found = {int(match[1]): match[0] for file in path.iterdir() if (match := FILE.fullmatch(file.name))}
    if not found:
        raise InputError(f"{path}: holds no {FIRST_FILE}")
    for number in range(len(found)):
        if number not in found:
            raise DamagedError(path, f"consolidated.{number:02d}.pth is missing: there are {len(found)} of them")
    return [found[number] for number in sorted(found)]


def _chunks(file: Saved) -> dict[str, Chunk]:
    """The tensors of a file."""
    with damage_of(file.path, file.name):
        if not isinstance(file.content, dict):
            raise ValueError("holds something else than a dictionary")
        tensors = {name: value for name, value in file.content.items() if name != IGNORED_TENSOR}
        for name, value in tensors.items():
            if not isinstance(name, str) or not is_tensor(value):
                raise ValueError(f"has {name!r:.100}, which is no tensor")
    return {chunk.name: chunk for chunk in file.chunks(tensors)}


def _told_model(path: Path, shapes: dict[str, tuple[int, ...]], files: int) -> Model:
    """The model that params.json and the first file's tensors tell."""
    values = read_object(path / PARAMS, MAX_PARAMS_BYTES)
    values = values.get("model", values)
    if not isinstance(values, dict):
        raise DamagedError(path, f"{PARAMS} holds no parameters of a model")
    tied = OUTPUT not in shapes
    by_rows = [shape[0] * files if shape else 0 for shape in (shapes.get(OUTPUT, ()), shapes.get(FFN_WEIGHT, ()))]
    if tied:
        told = values.get("vocab_size", -1)
        by_rows[0] = told if type(told) is int and told > 0 else (shapes.get(EMBEDDING) or (0,))[0]
    for size, name in zip(by_rows, (EMBEDDING if tied else OUTPUT, FFN_WEIGHT), strict=True):
        if not size:
            raise DamagedError(path, f"{FIRST_FILE} lacks {name}")
    return model_of(values, str(path / PARAMS), by_rows[0], by_rows[1], tied)


def plan(found: Weights, files: int = 1, dtype: str | None = None) -> OutputPlan:
    """Plan a folder of the weights `found`, divided among `files`, in `dtype`, or else in the one they have."""
    model, dtype = found.model, dtype or found.dtype
    check_files(model, files)

    def output(rank: int) -> Output:
        table = table_of(model, rank, files)
        content = {name: Planned(theirs, dtype) for name, theirs in table.items()}

        def write(stream: Stream, put: Put) -> None:
            write_torch(stream, content, put, "consolidated")

        size_here = sum(theirs.bytes(dtype) for theirs in table.values())
        return Output(f"consolidated.{rank:02d}.pth", size_here, write)

    outputs = tuple(output(rank) for rank in range(files))
    texts, copies = taken_along(found)
    return OutputPlan(outputs, texts | {PARAMS: json.dumps(params_of(model)).encode()}, copies)
