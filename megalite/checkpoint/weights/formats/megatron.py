"""Megatron-LM's older format: a file of every tensor- and pipeline-parallel rank, each a pickle with tensors.

`iter_0000010/mp_rank_TT_PPP/model_optim_rng.pt` holds a dictionary with the arguments, and under `model`, or under
`model0`, `model1` … of virtual stages, tensors whose layers are numbered from 0 in every one. Where ranks share out
experts, `mp_rank_TT_PPP_EEE`, or `mp_rank_TT_EEE` of one pipeline rank, has some of them, numbered from 0 too. Ranks
that differ in nothing but EEE have equal copies of all else.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
from megalite.checkpoint.weights.maps.fields import Fields
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
from megalite.checkpoint.weights.maps.megatron_experts import EXPERTS, Share
from megalite.checkpoint.weights.maps.models import dtype_of, has_experts
from megalite.checkpoint.weights.maps.strips import PREFIX, Table, Theirs, under_our_names
from megalite.config.model_schema import Model
from megalite.plan.model.weights import weights

FILES = ("model_optim_rng.pt", "model_rng.pt")  # file of a rank: the latter with a distributed optimizer, long ago
RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
CHUNK = re.compile(r"model(\d{0,3})")
LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d{1,5})\.")
LISTED_LAYERS = 5  # names in a message
TRANSPOSED_EXPERTS = re.compile(r".*\.mlp\.experts\.weight[12]")
Rank = tuple[int, int, int]  # tensor-parallel, pipeline and expert-parallel rank
Tensors = dict[str, Any]  # by name


@dataclass(frozen=True)
class Ranks:
    """The files of all ranks. split: whether tensor-parallel ranks share matrices of experts too."""

    files: Mapping[Rank, Saved]
    sizes: Rank  # how many ranks there are of each kind
    split: bool

    def first(self, pipeline: int) -> Rank:
        """The first rank with this pipeline rank."""
        return min(rank for rank in self.files if rank[1] == pipeline)

    def dense(self, rank: Rank) -> bool:
        """Return whether tensors beside experts are read from the file of `rank`, not from an equal one."""
        return all(rank <= other for other in self.files if other[:2] == rank[:2])

    def sparse(self, rank: Rank) -> bool:
        """Return whether tensors of experts are."""
        return self.split or all(rank <= other for other in self.files if other[1:] == rank[1:])

    def experts(self, rank: Rank, count: int) -> range:
        """The experts of a rank. Raises ValueError if ranks cannot have equally many."""
        if count % self.sizes[2]:
            raise ValueError(f"has the experts of one of {self.sizes[2]} ranks, which do not divide {count}")
        each = count // self.sizes[2]
        return range(each * rank[2], each * (rank[2] + 1))


def open_folder(path: Path, model: Model | None = None) -> Weights:
    """The weights in a folder; `model` is theirs, where their arguments do not tell it.

    Raises InputError for a model that megalite lacks, and DamagedError where files are not whole.
    """
    names = _names(path)
    source = names[min(names)]
    first = Saved(path, source)
    arguments = arguments_in(first.content)
    with damage_of(path, source):
        _check_version(first.content)
    model = told_model(path, source, arguments, model)
    ranks = _ranks(path, names, arguments or {})
    chunks = {rank: _chunks(file) for rank, file in ranks.files.items()}
    table, found = _matched(path, model, ranks, chunks)
    with damage_of(path, source):
        index = under_our_names(Index.of(found), table, weights(model), PREFIX)
    sizes = {file.name: file.bytes for file in ranks.files.values()}
    return Weights("megatron", path, model, index, sizes, source, True, *beside(path))


def _names(path: Path) -> dict[tuple[int, ...], str]:
    """The files of all ranks by the numbers of their folders. Raises InputError and DamagedError."""
    folder = latest(path)
    names: dict[tuple[int, ...], str] = {}
    for place in sorted((path / folder).glob("mp_rank_*")):
        found = RANK.fullmatch(place.name)
        file = next((name for name in FILES if (place / name).is_file()), None)
        if found is None or file is None:
            rule = (
                f"holds no {FILES[0]}"
                if found
                else "is no folder of a tensor- and a pipeline-parallel rank, or of one with experts"
            )
            raise DamagedError(path, f"{folder}{place.name} {rule}")
        names[tuple(int(number) for number in found.groups() if number)] = f"{folder}{place.name}/{file}"
    if not names:
        raise InputError(f"{path}: holds neither mp_rank_* folders nor a {TRACKER} that names a folder with some")
    return names


def _ranks(path: Path, names: Mapping[tuple[int, ...], str], arguments: Mapping[str, Any]) -> Ranks:
    """The files by rank, all of which must be there. Raises InputError and DamagedError."""
    told = Fields(f"{path}: args", arguments)
    ep = told.whole("expert_model_parallel_size", 1)
    alone = ep > 1 and told.whole("pipeline_model_parallel_size", 1) == 1
    found: dict[Rank, str] = {}
    for numbers, name in names.items():
        tensor, second, third = (*numbers, 0, 0)[:3]
        found[(tensor, 0, second) if alone and len(numbers) == 2 else (tensor, second, third)] = name
    tp, pp, most = (1 + max(rank[kind] for rank in found) for kind in range(3))
    ep = max(ep, most)
    apart = told.whole("expert_tensor_parallel_size", tp)
    if apart not in (1, tp):
        raise told.wrong("expert_tensor_parallel_size", f"must be 1 or tensor_model_parallel_size = {tp}")
    for rank in product(range(tp), range(pp), range(ep)):
        others = [*found] if apart < tp else []  # then ranks of experts are also those of the tensor-parallel group
        alike = any(rank[:2] == other[:2] for other in others) and any(rank[1:] == other[1:] for other in others)
        if rank not in found and not alike:
            some = f"{len(names)} of {tp} · {pp}{f' · {ep}' if ep > 1 else ''} ranks"
            raise DamagedError(path, f"{latest(path)}{_name(*rank, (pp, ep))} is missing: there are {some}")
    return Ranks({rank: Saved(path, name) for rank, name in found.items()}, (tp, pp, ep), apart == tp)


def _name(tensor: int, pipeline: int, expert: int = 0, sizes: tuple[int, int] = (1, 1)) -> str:
    """The folder of a rank. sizes: how many pipeline and expert-parallel ranks there are."""
    numbers = [number for number, size in zip((pipeline, expert), sizes, strict=True) if size > 1]
    return "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in numbers)])


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
        if TRANSPOSED_EXPERTS.fullmatch(known):
            raise ValueError(f"has {known}, matrices of all experts transposed; save it as torch_dist")
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


def _matched(path: Path, model: Model, ranks: Ranks, chunks: Mapping[Rank, list[Tensors]]) -> tuple[Table, list[Chunk]]:
    """Return how each tensor of all files is made of our weights, and where it lies, each once. Raises DamagedError."""
    layers, ours, rows = _layers(path, model, ranks, chunks), weights(model), _vocabulary(ranks, chunks)
    if rows < model.vocab_size:
        raise InputError(f"{path}: {EMBEDDING} has {rows} rows, too few for a vocabulary of {model.vocab_size}")
    table: dict[str, Theirs] = {}
    places: list[Chunk] = []
    for rank, file in ranks.files.items():
        dense, sparse = ranks.dense(rank), ranks.sparse(rank)
        for number, here in enumerate(chunks[rank]):
            with damage_of(path, file.name):
                share = Share(rank[0], ranks.sizes[0], _experts(model, ranks, rank, here), ranks.split)
            wanted = chunk_table(model, ours, layers[rank[1], number], rows, share)
            wanted = {known_as(name) or name: theirs for name, theirs in wanted.items()}
            refuse_differences(path, file.name, here, wanted)
            for chunk in file.chunks(here):
                theirs = wanted[chunk.name]
                if tuple(chunk.shape) != theirs.shape:
                    what = f"has {chunk.name} {list(chunk.shape)} instead of {list(theirs.shape)}"
                    raise DamagedError(path, f"{file.name} {what}")
                copy = chunk.name == OUTPUT and model.tie_embeddings
                first = sparse if EXPERTS in chunk.name else dense and not (rank[0] and replicated(chunk.name))
                if first and not copy:
                    name = f"{file.name} {number} {chunk.name}"
                    places.append(chunk._replace(name=name))
                    table[name] = theirs
    return table, places


def _experts(model: Model, ranks: Ranks, rank: Rank, tensors: Collection[str]) -> range:
    """The experts of a rank with these tensors; none if no layer has any. Raises ValueError."""
    there = sum(EXPERTS in name for name in tensors)
    if model.experts is None or not (there or all(has_experts(model))):
        return range(0)
    found = ranks.experts(rank, model.experts.count)
    if there < len(found):  # before a table is made of billions that a wrong number means
        raise ValueError(f"has {there} tensors of experts, fewer than its {len(found):,} experts")
    return found


def _layers(
    path: Path, model: Model, ranks: Ranks, chunks: Mapping[Rank, list[Tensors]]
) -> dict[tuple[int, int], range]:
    """The layers of every pipeline rank's every chunk, as many as there are in the first of its files."""
    found, first, virtual = {}, 0, len(chunks[ranks.first(0)])
    for rank, file in ranks.files.items():
        if len(chunks[rank]) != virtual:
            raise DamagedError(path, f"{file.name} has another number of virtual stages than others")
    for pipeline, number, _ in places(Split(ranks.sizes[0], ranks.sizes[1], virtual)):
        rank = ranks.first(pipeline)
        own = {int(match[1]) for name in chunks[rank][number] if (match := LAYER_NUMBER.match(name))}
        if own != set(range(len(own))):
            raise DamagedError(
                path, f"{ranks.files[rank].name} has layers {sorted(own)[:LISTED_LAYERS]} instead of 0, 1 …"
            )
        found[pipeline, number] = range(first, first + len(own))
        first += len(own)
    if first != model.layers:
        raise DamagedError(path, f"has {first} layers in {len(found)} stages instead of {model.layers}")
    return found


def _vocabulary(ranks: Ranks, chunks: Mapping[Rank, list[Tensors]]) -> int:
    """The size of the vocabulary with its padding, as the embedding has it."""
    rows = 0
    for rank, file in ranks.files.items():
        value = chunks[rank][0].get(EMBEDDING)
        if rank[1] == 0 and value is not None and ranks.dense(rank):
            (chunk,) = file.chunks({EMBEDDING: value})
            rows += chunk.shape[0] if len(chunk.shape) == 2 else 0
    return rows


def plan(found: Weights, split: Split = WHOLE_MODEL, dtype: str | None = None) -> OutputPlan:
    """Plan a folder of the weights `found`, divided by `split`, in `dtype`, or else in the one they have."""
    model, dtype = found.model, dtype or found.dtype
    check_split(model, split)
    size = padded(model.vocab_size, split.tp)
    arguments = saved_arguments(model, split, size, dtype)
    ours, layers = weights(model), uniform(model.layers, split)
    experts = range(0 if model.experts is None else model.experts.count)

    def output(tensor: int, pipeline: int) -> Output:
        tables = [
            chunk_table(model, ours, layers[pipeline, number], size, Share(tensor, split.tp, experts))
            for number in range(split.virtual)
        ]
        models = [
            {name: Planned(theirs, dtype_of(theirs.of, dtype)) for name, theirs in table.items()} for table in tables
        ]
        keys = ["model"] if split.virtual == 1 else [f"model{number}" for number in range(split.virtual)]
        content = {
            "args": arguments,
            "checkpoint_version": VERSION,
            "iteration": 0,
            **dict(zip(keys, models, strict=True)),
        }

        def write(stream: Stream, put: Put) -> None:
            write_torch(stream, content, put, FILES[0].removesuffix(".pt"))

        size_here = sum(each.theirs.bytes(each.dtype) for model in models for each in model.values())
        return Output(f"{RELEASE}/{_name(tensor, pipeline, sizes=(split.pp, 1))}/{FILES[0]}", size_here, write)

    outputs = tuple(output(*rank) for rank in product(range(split.tp), range(split.pp)))
    texts, copies = taken_along(found)
    return OutputPlan(outputs, texts | {TRACKER: f"{RELEASE}\n".encode()}, copies)
