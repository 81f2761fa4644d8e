"""Folders of both of Megatron-LM's formats: which folder holds the latest weights, and what is beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import is_file, is_folder
from megalite.checkpoint.store.disk import damage_of, read_whole
from megalite.checkpoint.weights.formats.inert_pickle import Made
from megalite.checkpoint.weights.maps.megatron_arguments import model_of
from megalite.config.model_schema import Model

TRACKER = "latest_checkpointed_iteration.txt"  # holds the number of the latest iteration, or `release`
RELEASE = "release"  # a folder of weights that belong to no iteration
VERSION = 3.0  # version of the order of queries, keys and values; earlier ones ordered them otherwise


def latest(path: Path) -> str:
    """The folder in `path` that its tracker names, and `/`; empty if there is no tracker. Raises InputError."""
    if not is_file(path / TRACKER):
        return ""
    with damage_of(path, TRACKER):
        told = read_whole(path, TRACKER, 100, links=True).decode("ascii").strip()
        if told != RELEASE and not re.fullmatch(r"\d{1,18}", told):
            raise ValueError(f"holds {told!r} instead of the number of an iteration, or {RELEASE}")
    folder = RELEASE if told == RELEASE else folder_of(int(told))
    if not is_folder(path / folder):
        raise InputError(f"{path}: {TRACKER} names {folder}, which is not there")
    return f"{folder}/"


def has(path: Path, *patterns: str) -> bool:
    """Return whether the latest weights in `path` have files of all these names."""
    try:
        folder = path / latest(path)
        return all(any(True for _ in folder.glob(pattern)) for pattern in patterns)
    except (InputError, OSError):
        return False


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


def folder_of(iteration: int) -> str:
    """The folder of an iteration."""
    return f"iter_{iteration:07d}"
