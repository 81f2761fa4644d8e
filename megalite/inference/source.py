"""Sources of a model: the single place that opens a run, or weights of any kind, to compute with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megalite.base.errors import InputError
from megalite.base.files import is_folder
from megalite.checkpoint.run.load import Restorer
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.manifest import STEP_NAME, complete, step_of
from megalite.checkpoint.store.state import State
from megalite.checkpoint.weights.formats.tokenizer import GENERATION_CONFIG, ends_in
from megalite.checkpoint.weights.sources import open_weights, resolved
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.data.tokenizer import Tokenizer
from megalite.data.trial import open_tokenizer_file

TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # files of a model that has one
T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """A model whose weights can be read."""

    name: str  # in messages
    model: Model
    fill: Callable[[State, HostGroup], None]  # with the weights, in any layout; collective
    tokenizer: Path | None  # file of the model's tokenizer; None: there is none that may be opened
    wanted: str  # message where there is no tokenizer
    end_of_document: int | None  # id of the token that ends documents; None: as the tokenizer says
    ends: frozenset[int] = frozenset()  # further ids that end a text
    begins: bool = False  # whether texts begin as the tokenizer would let them, with a special token for example
    run: Path | None = None  # the run folder that it lies in
    step: int = 0  # step of that run
    drafting: "Opened | None" = None  # the same with a layer of multi-token prediction, if there is one

    def with_mtp(self) -> "Opened":
        """Return the same with a layer of multi-token prediction. Raises InputError where there is none."""
        if self.drafting is None:
            raise InputError(f"--draft: {self.name} has no layers of multi-token prediction (model.mtp); leave it out")
        return self.drafting


Open = Callable[[], Opened]


def sources(text: str, base: str | None = None) -> list[Open]:
    """Find what can be opened at `text`, oldest first: all checkpoints of a run, or weights. Raises InputError.

    base: weights to which those of an adapter are added; None: those that it names.
    """
    kind, path = resolved(text)
    run = complete(path / "checkpoints") if kind == "megalite" else []
    if run:
        return [partial(_open, f"megalite:{checkpoint}", path, step_of(checkpoint), base) for checkpoint in run]
    if kind == "megalite" and STEP_NAME.fullmatch(path.absolute().name):
        return [partial(_open, f"megalite:{path}", path.resolve().parent.parent, step_of(path), base)]
    return [partial(_open, f"{kind}:{path}", None, 0, base)]


def open_newest(
    text: str, use: Callable[[Opened], T], group: HostGroup, warn: Callable[[str], None], base: str | None = None
) -> T:
    """Call `use` with the newest undamaged source at `text` and return its result; `warn` is called for damaged ones.

    base: as for `sources`. Collective, as `use` is, which fills the model, and raises the same DamagedError on all
    ranks.
    """
    found = group.once(lambda: sources(text, base))
    for number, source in reversed(list(enumerate(found))):
        try:
            return use(group.everywhere(source))
        except DamagedError as error:
            if number == 0:
                raise
            if group.leads:
                warn(f"{error}; the checkpoint before is used")
    raise AssertionError("there is at least one source")


def to_open(run: str, adapters: Sequence[str]) -> list[tuple[str, str | None]]:
    """The sources that a command opens one after another, each with its base: `run` alone, or adapters beside it."""
    return [(adapter, run) for adapter in adapters] or [(run, None)]


def open_tokenizer(opened: Opened, instead: str | None = None) -> tuple[Tokenizer, int | None]:
    """The model's tokenizer, or the one given instead, and the id that ends documents. Raises InputError."""
    file = instead or opened.tokenizer
    if file is None:
        raise InputError(opened.wanted)
    tokenizer = open_tokenizer_file(file)
    if tokenizer.vocab_size > opened.model.vocab_size:
        raise InputError(
            f"{file}: has {tokenizer.vocab_size} tokens, but the model of {opened.name} knows "
            f"{opened.model.vocab_size}; give the tokenizer that it was trained with"
        )
    return tokenizer, tokenizer.eod if opened.end_of_document is None else opened.end_of_document


def _open(source: str, run: Path | None, step: int, base: str | None) -> Opened:
    """The weights `source`. Raises DamagedError before memory is taken for them."""
    whole = open_weights(source, base=base)
    found = whole.without_mtp()
    tokenizer = found.tokenizer or next((file for file in found.companions if file.name in TOKENIZERS), None)
    settings = next((file.parent for file in found.companions if file.name == GENERATION_CONFIG), None)
    ends = ends_in(settings) if settings is not None else ()
    # A tokenizer that a checkpoint names is not opened: anybody may have written its path.
    trained = f", as {found.tokenizer_name!r:.200}" if found.tokenizer_name else ""
    opened = Opened(
        name=str(found.path) if found.merging is None else f"{found.path} + {found.merging.factors.path}",
        model=found.model,
        fill=partial(_fill, source, found.model, base),
        tokenizer=tokenizer,
        wanted=f"{run or found.path}: has no copy of the model's tokenizer; give --tokenizer{trained}",
        end_of_document=ends[0] if ends else found.end,
        ends=frozenset(ends),
        begins=bool(found.companions),  # a run's own checkpoint has none
        run=run if run is not None and is_folder(run / "checkpoints") else None,
        step=step,
    )
    if whole.model.mtp is None:
        return opened
    model = replace(whole.model, mtp=replace(whole.model.mtp, depth=1))  # others would draft from what it drafts
    return replace(opened, drafting=replace(opened, model=model, fill=partial(_fill, source, model, base)))


def _fill(source: str, model: Model, base: str | None, state: State, group: HostGroup) -> None:
    Restorer(state, Config(model=model), (), group).weights(source, base)
