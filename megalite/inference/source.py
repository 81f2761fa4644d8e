"""Where a model comes from: the single place that opens a run folder or a checkpoint to compute with its weights."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from megalite.checkpoint.disk import DamagedError
from megalite.checkpoint.host_group import HostGroup
from megalite.checkpoint.load import Restorer
from megalite.checkpoint.manifest import INDEX, NAME, check_sizes, complete
from megalite.checkpoint.read import Reader
from megalite.checkpoint.state import State
from megalite.checkpoint.wanted import differences_from
from megalite.config.errors import InputError
from megalite.config.schema import Config, Model
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.train.starts import kept_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """A model whose weights can be read."""

    name: str  # in messages
    model: Model
    fill: Callable[[State, HostGroup], None]  # with the weights, in any layout; collective
    tokenizer: Path | None  # of the model; None: there is none that may be opened
    wanted: str  # what is said where there is none
    end_of_document: int | None  # id of the token that ends documents; None: as the tokenizer says
    run: Path | None = None  # the run folder that it lies in
    step: int = 0  # of that run


Open = Callable[[], Opened]


def sources(text: str) -> list[Open]:
    """What can be opened at `text`, oldest first: all checkpoints of a run, or the one given. Raises InputError."""
    folder, found = find_checkpoints(Path(text))
    return [partial(_open_checkpoint, folder, path) for path in found]


def open_newest(text: str, use: Callable[[Opened], T], group: HostGroup, warn: Callable[[str], None]) -> T:
    """What `use` makes of the newest source at `text` that is not damaged; `warn` is told of those that are.

    Collective, as `use` is, which fills the model and raises the same DamagedError on all ranks.
    """
    found = group.once(lambda: sources(text))
    for number, source in reversed(list(enumerate(found))):
        try:
            return use(group.everywhere(source))
        except DamagedError as error:
            if number == 0:
                raise
            if group.leads:
                warn(f"{error}; the checkpoint before is used")
    raise AssertionError("there is at least one source")


def find_checkpoints(path: Path) -> tuple[Path, list[Path]]:
    """The run folder, and the checkpoints at `path`, oldest first: all of a run, or the one given."""
    if NAME.fullmatch(path.absolute().name):
        return Path(os.path.realpath(path)).parent.parent, [path]
    found = complete(path / "checkpoints")
    if not found:
        raise InputError(f"{path}: no checkpoint; give a run folder, or one of its checkpoints")
    return path, found


def open_tokenizer(opened: Opened, instead: str | None = None) -> tuple[Tokenizer, int | None]:
    """The model's tokenizer, or the one given instead, and the id that ends documents. Raises InputError."""
    file = instead or opened.tokenizer
    if file is None:
        raise InputError(opened.wanted)
    tokenizer = load_tokenizer(file)
    if tokenizer.vocab_size > opened.model.vocab_size:
        raise InputError(
            f"{file}: has {tokenizer.vocab_size} tokens, but the model of {opened.name} knows "
            f"{opened.model.vocab_size}; give the tokenizer that it was trained with"
        )
    return tokenizer, tokenizer.eod if opened.end_of_document is None else opened.end_of_document


def _open_checkpoint(folder: Path, path: Path) -> Opened:
    """The checkpoint `path` of the run `folder`. Raises DamagedError."""
    manifest = check_sizes(path)
    config = manifest.configuration
    if differ := differences_from(Reader(path, manifest).index, config.model):  # before memory is taken for it
        raise DamagedError(path, f"{INDEX} does not have the tensors of its model: {differ}")
    # A tokenizer that a checkpoint names is not opened: anybody may have written its path.
    trained = f", as {config.data.tokenizer!r:.200}" if config.data.tokenizer else ""
    return Opened(
        name=str(path),
        model=config.model,
        fill=partial(_fill, path, config.model),
        tokenizer=kept_tokenizer(folder),
        wanted=f"{folder}: has no copy of the run's tokenizer; give --tokenizer{trained}",
        end_of_document=config.data.end_of_document,
        run=folder,
        step=manifest.step,
    )


def _fill(path: Path, model: Model, state: State, group: HostGroup) -> None:
    Restorer(state, Config(model=model), (), group).weights(path)
