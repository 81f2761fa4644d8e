"""Opens weights of any kind: `KIND:PATH`, or a path whose kind its files tell. Imports no torch."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shortened

from megalite.base.errors import InputError, listing
from megalite.base.files import exists, is_file, is_folder
from megalite.base.late_import import import_for_good
from megalite.checkpoint.store.disk import DamagedError, damage_of, read_whole
from megalite.checkpoint.store.index import MAX_INDEX_BYTES, Index
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, Manifest, check_sizes, complete
from megalite.checkpoint.store.progress import Training
from megalite.checkpoint.weights.formats import huggingface, peft
from megalite.checkpoint.weights.formats.megatron_folder import has
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.tokenizer import kept_tokenizer
from megalite.checkpoint.weights.maps.families import CONFIG, read_config
from megalite.checkpoint.weights.maps.models import is_correction
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.merged import BASE, merged
from megalite.checkpoint.weights.missing_tensors import FLOATS, differences_from
from megalite.config.model_schema import Model
from megalite.config.sources import KINDS, split_kind


def kind_of(path: Path) -> str:
    """The kind of weights in the folder `path`. Raises InputError if its files tell none."""
    if not is_folder(path):
        raise InputError(
            f"{path}: there is no such folder; give a run folder, one of its checkpoints, or KIND:PATH, with a kind of "
            f"{listing(list(KINDS))}"
        )
    for kind, tells in SIGNS.items():
        if tells(path):
            return kind
    raise InputError(f"{path}: holds no weights of a known kind; say which as KIND:PATH, of {listing(list(KINDS))}")


def open_weights(text: str, model: Model | None = None, states: bool = False, base: str | None = None) -> Weights:
    """The weights at `KIND:PATH`. Raises InputError, and DamagedError for files that are not whole.

    model: of files that may not tell it, Megatron's and Meta's. states: whether the optimizer's are wanted, too. base:
    weights to which those of an adapter are added; None: those that it names.
    """
    kind, path = resolved(text)
    if base is not None or kind == "peft":
        found = _adapter(kind, path, base, model)
    else:
        found = _open(kind, path, model, states)
    for name, tensor in found.index.tensors.items():
        if tensor.dtype not in FLOATS and not name.startswith(PREFIX):
            raise DamagedError(path, f"{name} is of {tensor.dtype}; states must be of {listing(FLOATS)}")
        if tensor.dtype not in FLOATS:
            rule = f"{name} is of {tensor.dtype}; weights must be of {listing(FLOATS)}"
            raise DamagedError(path, f"{rule}, so a quantized model must be turned into one of these first")
    return found


def read_model(text: str) -> Model:
    """The model of the weights at `KIND:PATH`, as `open_weights`; tensors are not looked at unless they tell it."""
    kind, path = resolved(text)
    told = read_config(path)[1] if kind == "hf" else None
    return told if told is not None and told.mtp is None else open_weights(text).model  # layers of mtp may be left out


def _open(kind: str, path: Path, model: Model | None = None, states: bool = False) -> Weights:
    if states and kind not in STATEFUL_KINDS:
        raise InputError(f"{kind}:{path}: {STATE_REFUSALS[kind]}; leave --optimizer out")
    wanted = {"states": True} if states else {}
    if kind in LAZY_MODULES:  # by name and only now: these modules write too, with PyTorch
        module = import_for_good(f"megalite.checkpoint.weights.formats.{LAZY_MODULES[kind]}")
        found: Weights = module.open_folder(path, model, **wanted)
        return found
    if model is not None:
        raise InputError(f"{kind}:{path}: tells its model itself, so none can be given")
    return OPENERS[kind](path, **wanted)


def resolved(text: str) -> tuple[str, Path]:
    """The kind and the folder of `KIND:PATH`."""
    kind, path = split_kind(text)
    if kind is not None and not is_folder(path):
        raise InputError(f"{text}: there is no folder {path}")
    return kind or kind_of(path), path


def open_checkpoint(path: Path, states: bool = False, base: str | None = None) -> Weights:
    """The weights of a checkpoint of megalite, or of the newest one of a run; with `states`, the optimizer's too.

    base: of an adapter, if not the one that it names. Raises DamagedError, and InputError.
    """
    path = newest(path)
    manifest = check_sizes(path)
    config = manifest.configuration
    with damage_of(path, INDEX):
        index = Index.decode(read_whole(path, INDEX, MAX_INDEX_BYTES, manifest.files[INDEX]))
        if differ := differences_from(index, config.model):
            raise ValueError(f"does not have the tensors of its model: {differ}")
        if strange := [name for name in index.files if name not in manifest.files]:
            raise ValueError(f"names {shortened(strange[0])}, a file that {MANIFEST} does not list")
    training = None
    if states:
        if not manifest.resumable:
            raise InputError(f"{path}: holds weights only, no states of an optimizer; leave --optimizer out")
        module = import_for_good("megalite.checkpoint.run.tensors")
        training = Training(module.Checkpoint(path).progress()[0], config)
    if config.adapter is not None:
        return _adapted(path, manifest, index, base)
    kept = (PREFIX, "optimizer.") if states else PREFIX
    weights = {name: tensor for name, tensor in index.tensors.items() if name.startswith(kept)}
    if states and (problem := _states_missing([name for name in weights if not is_correction(name)])):
        raise DamagedError(path, f"{INDEX} {problem}")
    return Weights(
        "megalite",
        path,
        config.model,
        Index(index.files, weights),
        {name: file.bytes for name, file in manifest.files.items()},
        INDEX,
        links=False,
        companions=tuple(path / name for name in manifest.files if huggingface.COMPANIONS.fullmatch(name)),
        tokenizer=kept_tokenizer(Path(os.path.realpath(path)).parent.parent) if not manifest.foreign else None,
        tokenizer_name=config.data.tokenizer,
        end=config.data.end_of_document,
        trained=manifest.resumable,
        training=training,
        manifest=manifest,
        hashes={name: manifest.files[name] for name in index.files},
    )


def _adapter(kind: str, path: Path, source: str | None, model: Model | None) -> Weights:
    """A base with an adapter merged into it. source: of the base; None: as the adapter names it."""
    if kind == "peft":
        base = open_weights(source or peft.base_of(path), model).without_mtp()
        return merged(base, *peft.open_folder(path, base))
    if kind != "megalite" or (found := open_checkpoint(path, base=source)).merging is None:
        raise InputError(
            f"{kind}:{path}: is no adapter, so it cannot be added to {source}; name a run with one, or peft:PATH"
        )
    return found


def _adapted(path: Path, manifest: Manifest, index: Index, source: str | None) -> Weights:
    """The base of an adapter's checkpoint, with the adapter merged into it. source: of the base, if not its own."""
    config = manifest.configuration
    assert config.adapter is not None
    kept = {name: stored for name, stored in index.tensors.items() if name.startswith(PREFIX) or name == BASE}
    factors = Weights(
        "megalite",
        path,
        config.model,
        Index(index.files, kept),
        {name: file.bytes for name, file in manifest.files.items()},
        INDEX,
        links=False,
        hashes={name: manifest.files[name] for name in index.files},
    )
    source = source or config.checkpoint.weights
    if source is None:
        raise InputError(f"{path}: is an adapter, and does not tell the weights of its base")
    try:
        _refuse_circle(path, source)
        base = open_weights(source).without_mtp()
    except InputError as error:
        fix = "if it lies elsewhere now, name it: --base of megalite-convert, or BASE --adapter RUN of other tools"
        raise InputError(f"{path}: is an adapter, whose base cannot be opened: {error}; {fix}") from None
    kept_one = kept_tokenizer(Path(os.path.realpath(path)).parent.parent)
    return replace(merged(base, factors, config.adapter), tokenizer=kept_one or base.tokenizer)


def _refuse_circle(path: Path, source: str) -> None:
    """Raises InputError where the base of an adapter, or the base of that, is the adapter itself."""
    seen = {os.path.realpath(path)}
    following: str | None = source
    while following is not None:
        kind, there = resolved(following)
        if kind != "megalite":
            return
        there = newest(there)
        if os.path.realpath(there) in seen:
            raise InputError(f"{source} leads back to the adapter itself")
        seen.add(os.path.realpath(there))
        config = check_sizes(there).configuration
        following = config.checkpoint.weights if config.adapter is not None else None


def _states_missing(tensors: Sequence[str]) -> str | None:
    """Describe why the states among tensors that are trained are not those of an optimizer; None if they are."""
    states: dict[str, set[str]] = {name.removeprefix(PREFIX): set() for name in tensors if name.startswith(PREFIX)}
    for name in tensors:
        if not name.startswith(PREFIX):
            state, _, weight = name.removeprefix("optimizer.").partition(".")
            if weight not in states:
                return f"has {name[:100]}, which is the state of no weight"
            states[weight].add(state)
    wrong = next((name for name, found in states.items() if found not in COMPLETE_STATES), None)
    return wrong and f"has not all states of {wrong}"


def newest(path: Path) -> Path:
    """The checkpoint at `path`: itself, or of a run folder the newest."""
    if exists(path / MANIFEST):
        return path
    found = complete(path / "checkpoints") or complete(path)
    if not found:
        raise InputError(f"{path}: holds no checkpoint; give a run folder, or one of its checkpoints")
    return found[-1]


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: all(is_file(path / name) for name in names)


SIGNS: dict[str, Callable[[Path], bool]] = {
    "peft": _has(peft.CONFIG),
    "megalite": lambda path: exists(path / MANIFEST) or is_folder(path / "checkpoints") or bool(complete(path)),
    "hf": _has(CONFIG),
    "megatron-dist": lambda path: has(path, ".metadata", "metadata.json"),
    "megatron": lambda path: has(path, "mp_rank_00*/*.pt"),
    "meta": _has("params.json", "consolidated.00.pth"),
}
OPENERS: dict[str, Callable[..., Weights]] = {"megalite": open_checkpoint, "hf": huggingface.open_folder}
STATEFUL_KINDS = ("megalite", "megatron-dist")  # kinds whose states of an optimizer can be read and written
COMPLETE_STATES = ({"exp_avg", "exp_avg_sq"}, {"momentum_buffer"})  # states of a weight: of AdamW, of Muon
STATE_REFUSALS = {  # why those of others cannot
    "hf": "has no place for an optimizer's states",
    "meta": "has no place for an optimizer's states",
    "megatron": "numbers an optimizer's states in an order that versions and layouts change; megatron-dist names them",
}
LAZY_MODULES = {
    "megatron-dist": "torch_dist",
    "megatron": "megatron",
    "meta": "meta",
}  # modules of kinds that need not tell
