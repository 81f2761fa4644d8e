"""What both of Megatron-LM's formats share: which folder holds the latest weights, and what is beside it."""

import io
import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.disk import DamagedError, damage_of, read_whole
from megalite.checkpoint.formats.huggingface import COMPANIONS
from megalite.checkpoint.formats.inert_pickle import Made
from megalite.checkpoint.formats.opened import Weights
from megalite.checkpoint.maps.families import CONFIG, read_config
from megalite.checkpoint.maps.megatron import Split
from megalite.checkpoint.maps.megatron_arguments import arguments_of, model_of
from megalite.config.errors import InputError, listing
from megalite.config.files import is_file, is_folder
from megalite.config.schema import Model

TRACKER = "latest_checkpointed_iteration.txt"  # holds the number of the latest iteration, or `release`
RELEASE = "release"  # a folder of weights that belong to no iteration
HUGGING_FACE = "huggingface"  # our folder of what belongs to the same model elsewhere
VERSION = 3.0  # of the order of queries, keys and values; those before ordered them otherwise
SHOWN = 5  # names in a message
DTYPES = ("float32", "bfloat16", "float16")


def latest(path: Path) -> str:
    """The folder in `path` that its tracker names, and `/`; empty if there is no tracker. Raises InputError."""
    if not is_file(path / TRACKER):
        return ""
    with damage_of(path, TRACKER):
        told = read_whole(path, TRACKER, 100, links=True).decode("ascii").strip()
        if told != RELEASE and not re.fullmatch(r"\d{1,18}", told):
            raise ValueError(f"holds {told!r} instead of the number of an iteration, or {RELEASE}")
    folder = RELEASE if told == RELEASE else f"iter_{int(told):07d}"
    if not is_folder(path / folder):
        raise InputError(f"{path}: {TRACKER} names {folder}, which is not there")
    return f"{folder}/"


def has(path: Path, *patterns: str) -> bool:
    """Whether the latest weights in `path` have files of all these names."""
    try:
        folder = path / latest(path)
        return all(any(True for _ in folder.glob(pattern)) for pattern in patterns)
    except (InputError, OSError):
        return False


def beside(path: Path) -> tuple[str | None, tuple[Path, ...]]:
    """The Hugging Face family that the model of the folder `path` is of, and the files that belong to it, if any."""
    folder = path / HUGGING_FACE
    if not is_folder(folder):
        return None, ()
    files = tuple(sorted(file for file in folder.iterdir() if file.is_file() and COMPANIONS.fullmatch(file.name)))
    return (read_config(folder)[0].model_type if is_file(folder / CONFIG) else None), files


def arguments_in(content: Any) -> dict[str, Any] | None:
    """The arguments that were saved, if any."""
    match content:
        case {"args": Made("argparse.Namespace", state=dict(arguments))}:
            return arguments
        case {"args": dict(arguments)}:
            return arguments
    return None


def told_model(path: Path, file: str, arguments: Mapping[str, Any] | None, given: Model | None) -> Model:
    """The given model, or that of the arguments in `file`. Raises InputError if there is neither."""
    if given is not None:
        return given
    if arguments is None:
        raise InputError(f"{path}: {file} has no arguments that tell the model; give its configuration")
    return model_of(arguments, f"{path}: {file}")


def saved_arguments(model: Model, split: Split, size: int, dtype: str) -> Namespace:
    """The arguments as Megatron saves them."""
    if dtype not in DTYPES:
        raise InputError(f"{dtype}: Megatron has weights of {listing(DTYPES)}")
    return Namespace(**arguments_of(model, split, size, dtype), params_dtype=getattr(torch, dtype))


def refuse_differences(path: Path, file: str, found: Collection[str], wanted: Collection[str]) -> None:
    """Raises DamagedError where tensors are missing, or are there that the model does not have."""
    names = set(found), set(wanted)
    for odd, what in ((names[1] - names[0], "lacks"), (names[0] - names[1], "has what its model has not:")):
        if odd:
            more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
            raise DamagedError(path, f"{file} {what} {', '.join(sorted(odd)[:SHOWN])}{more}")


def copies(found: Weights) -> dict[str, Path]:
    """What is to be copied beside the weights, by its name there."""
    return {f"{HUGGING_FACE}/{file.name}": file for file in found.companions}


def pickled(content: Any) -> bytes:
    """A small file, as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
