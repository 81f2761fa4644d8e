"""Writes a checkpoint of megalite, a folder of PyTorch Distributed Checkpoint, from weights of any format.

A checkpoint of weights alone has no progress: a run begins from it with `checkpoint.weights`. A run can resume from one
that has the states of an optimizer too.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import File
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.index import Chunk, Index
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, STEP_NAME, Manifest, is_plain, step_of
from megalite.checkpoint.store.progress import Training
from megalite.checkpoint.store.state import progress_tensors
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.output import Output, OutputPlan, Put, Stream, Written
from megalite.checkpoint.weights.formats.tokenizer import companions_of
from megalite.checkpoint.weights.formats.torch_file import Planned, write_torch
from megalite.checkpoint.weights.maps.models import dtype_of
from megalite.checkpoint.weights.maps.strips import PREFIX, Theirs, stacked
from megalite.config.convert import to_plain
from megalite.config.schema import Config
from megalite.plan.model.weights import weights

PRECISIONS: Mapping[str, tuple[Literal["bf16", "fp32", "fp64"], ...]] = {
    "float32": ("bf16", "fp32"),
    "float64": ("fp64",),
}  # precisions of runs, by data type of their weights and states


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that is written."""

    name: str
    theirs: Theirs
    dtype: str

    @property
    def bytes(self) -> int:
        return self.theirs.bytes(self.dtype)


def plan(found: Weights, target: Path, dtype: str | None, files: int) -> OutputPlan:
    """A checkpoint in about so many files of equal size; dtype: of all tensors, None: each keeps its own.

    Raises InputError where a run could not resume from it, though `found` has the states for that.
    """
    parts = list(_parts(found, dtype))
    shares: list[list[OutputTensor]] = [[] for _ in range(files)]
    loads = [0] * files
    for part in sorted(parts, key=lambda part: -part.bytes):
        least = loads.index(min(loads))
        loads[least] += part.bytes
        shares[least].append(part)
    outputs = [
        Output(f"__{number}_0.distcp", load, partial(_write, share))
        for number, (share, load) in enumerate(zip(shares, loads, strict=True))
        if share
    ]
    if found.training is not None:
        _refuse_unfit(found.training, parts, target)
        rate, seed = found.training.rate, found.training.config.run.seed
        tensors = progress_tensors(found.training.progress, rate, seed)
        parts += [_small(name, tensor) for name, tensor in tensors.items()]
        outputs.append(Output(f"__{files}_0.distcp", 0, partial(_write_small, tensors)))
    texts, copies = companions_of(found)
    copies = {name: path for name, path in copies.items() if is_plain(name)}
    return OutputPlan(tuple(outputs), texts, copies, partial(_finish, found, target, parts))


def _parts(found: Weights, dtype: str | None) -> Iterable[OutputTensor]:
    """The weights and the states in the index of `found`."""
    forms, tensors = weights(found.model), found.index.tensors
    for name, form in forms.items():
        wanted = dtype_of(name, dtype) if dtype else tensors[PREFIX + name].dtype
        yield OutputTensor(PREFIX + name, stacked([(name, form)]), wanted)
    for name, stored in tensors.items():
        if not name.startswith(PREFIX):
            state, _, weight = name.removeprefix("optimizer.").partition(".")
            theirs = stacked([(weight, forms[weight])])
            yield OutputTensor(name, replace(theirs, kind=f"optimizer.{state}."), dtype or stored.dtype)


def _refuse_unfit(training: Training, parts: Iterable[OutputTensor], target: Path) -> None:
    parts = list(parts)
    for part in parts:
        if part.dtype not in PRECISIONS or part.dtype != parts[0].dtype:
            rule = "a run resumes from tensors all of float32 or all of float64"
            raise InputError(f"{target}: {part.name} would be of {part.dtype}; {rule}, so use --dtype fp32")
    step = training.progress.step
    if STEP_NAME.fullmatch(name := target.absolute().name) and step_of(target) != step:
        raise InputError(f"{target}: must not be called {name}, as the run is at step {step}; call it step-{step:08d}")


def _small(name: str, tensor: Tensor) -> OutputTensor:
    return OutputTensor(name, Theirs(tuple(tensor.shape), ()), str(tensor.dtype).removeprefix("torch."))


def _write(parts: Sequence[OutputTensor], stream: Stream, put: Put) -> list[list[Any]]:
    """Write a file of tensors. Returns of each: name, start and length of its archive, position of its elements."""
    places = []
    for part in parts:
        start = stream.tell()
        ((position, _),) = write_torch(stream, Planned(part.theirs, part.dtype), put)
        places.append([part.name, start, stream.tell() - start, position])
    return places


def _write_small(tensors: Mapping[str, Tensor], stream: Stream, _: Put) -> list[list[Any]]:
    """Write a file of tensors that are in memory."""
    places = []
    for name, tensor in tensors.items():
        content = tensor.numpy().tobytes()
        places += _write([_small(name, tensor)], stream, lambda record, *_, content=content: record.write(content))
    return places


def _finish(
    found: Weights, target: Path, parts: Sequence[OutputTensor], written: Mapping[str, Written]
) -> dict[str, bytes]:
    """The indexes and the manifest."""
    places = {name: (file, *at) for file, each in written.items() for name, *at in each.note or ()}
    chunks: list[Chunk] = []
    described: dict[str, Any] = {}
    stored = {}
    for part in parts:
        file, start, length, position = places[part.name]
        shape = part.theirs.shape
        origin, sizes = torch.Size([0] * len(shape)), torch.Size(shape)
        chunks.append(Chunk(part.name, part.dtype, shape, file, position, origin, sizes))
        properties = TensorProperties(getattr(torch, part.dtype))
        described[part.name] = TensorStorageMetadata(properties, sizes, [ChunkStorageMetadata(origin, sizes)])
        stored[MetadataIndex(part.name, origin)] = _StorageInfo(file, start, length)
    small = {
        INDEX: Index.of(chunks).encode(),
        METADATA: pickle.dumps(Metadata(described, storage_data=stored)),
    }
    hashes = {name: File(len(content), xxhash.xxh3_128_hexdigest(content)) for name, content in small.items()}
    files = {name: each.file for name, each in written.items()} | hashes
    return {**small, MANIFEST: _manifest(found, target, parts, files).render().encode()}


def _manifest(found: Weights, target: Path, parts: Sequence[OutputTensor], files: dict[str, File]) -> Manifest:
    training = found.training
    config = Config(model=found.model) if training is None else training.config
    if training is not None:  # weights in another data type than before are those of a run of another precision
        fits = PRECISIONS[parts[0].dtype]
        precision = config.train.precision if config.train.dtype in fits else fits[-1]
        config = replace(config, train=replace(config.train, precision=precision))
        if found.manifest is not None:
            return replace(found.manifest, config=to_plain(config), files=files)
    named = step_of(target) if STEP_NAME.fullmatch(target.absolute().name) else 0
    return Manifest(
        step=named if training is None else training.progress.step,
        tokens=None if training is None else training.progress.tokens,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks=None,
        layout=None,
        versions={name: version(name) for name in ("megalite", "torch")},
        config=to_plain(config),
        data=(),
        files=files,
    )
