"""Checks, before any rank is started, whether a run can begin as `checkpoint.resume` says. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from megalite.base.errors import InputError, Problem
from megalite.checkpoint.run.same_run import refuse_other_factors, refuse_other_run, refuse_other_weights
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.store.manifest import Manifest, Source, check_sizes, complete, step_of
from megalite.checkpoint.store.retain import check_own, refuse_only_damaged
from megalite.checkpoint.weights.formats.peft import modules_with_factors
from megalite.checkpoint.weights.maps.families import family_of
from megalite.checkpoint.weights.maps.folded import folded
from megalite.checkpoint.weights.sources import newest, open_weights, read_model, resolved
from megalite.config.model_schema import Adapter
from megalite.config.schema import Config


def check_start(config: Config, folder: Path) -> None:
    """Raises InputError for a checkpoint of another model, and for one that is not the newest in `folder`.

    A run that continued from an older one would save under names that exist already.
    """
    found, wanted, weights = complete(folder), config.checkpoint.resume, config.checkpoint.weights
    if config.adapter is not None and weights is None:
        rule = "is needed for adapter: the weights beside which it is trained"
        raise InputError([Problem("checkpoint.weights", rule, "give KIND:PATH, such as hf:SmolLM2-135M", None)])
    if wanted == "never" and found:
        raise InputError(
            f"checkpoint.resume = never, but {folder} holds {found[-1].name}; "
            "give run.name another name, or resume with checkpoint.resume=auto"
        )
    if wanted not in ("auto", "never"):
        step = _read(wanted, "checkpoint.resume", config).step
        if found and step_of(found[-1]) > step:
            raise InputError(
                f"checkpoint.resume = {wanted}, but {folder} already holds {found[-1].name}, which is newer; "
                "continue from that with checkpoint.resume=auto, or give run.name another name"
            )
    elif weights is not None and (not found or config.adapter is not None):
        _check_weights(weights, config)
        if config.adapter is not None and config.adapter.weights is not None and not found:
            _check_factors(config.adapter.weights, weights, config)
    if config.checkpoint.export == "peft" and config.adapter is not None and weights is not None:
        _check_peft(weights, config.adapter)


def check_export(config: Config) -> None:
    """Raises InputError if the model cannot be exported as `checkpoint.export` asks."""
    if config.checkpoint.export is not None:
        try:
            family_of(folded(replace(config.model, mtp=None))[0])  # its layers are left out where they have no place
        except InputError as error:
            problem = Problem("checkpoint.export", str(error), "use null", config.checkpoint.export)
            raise InputError([problem]) from None


def starting_point(config: Config, folder: Path, data: tuple[Source, ...]) -> int:
    """The step from which a run goes on, as `checkpoint.resume` and the content of `folder` say; 0: from the beginning.

    data: the sources that the run reads. Raises InputError if that checkpoint is of another model, other data or
    another optimizer, or if only damaged ones are left.
    """
    wanted = config.checkpoint.resume
    candidates = {"auto": complete(folder)[::-1], "never": []}.get(wanted, [Path(wanted)])
    for path in candidates:
        try:
            manifest = check_own(path) if wanted == "auto" else check_sizes(path)
        except DamagedError:
            if wanted != "auto":
                raise
            continue  # the ranks will set it aside, and say so
        refuse_other_run(path, manifest, config, data)
        return manifest.step
    if wanted == "auto" and config.checkpoint.local is None:  # else nodes may have a newer one
        refuse_only_damaged(folder, candidates)
    return 0


def _read(path: str, key: str, config: Config) -> Manifest:
    try:
        manifest = Manifest.read(Path(path))
    except DamagedError as error:
        raise InputError(f"{key}: is not a checkpoint: {error}") from None
    refuse_other_weights(Path(path), manifest.configuration.model, config)
    return manifest


def _check_factors(source: str, base: str, config: Config) -> None:
    try:
        found = open_weights(source, base=base)
    except InputError as error:
        raise InputError(f"adapter.weights: {error}") from None
    refuse_other_factors(source, found, config)


def _check_peft(base: str, adapter: Adapter) -> None:
    """Raises InputError if PEFT's files cannot hold an adapter beside the weights `base`."""
    try:
        modules_with_factors(open_weights(base).folded(), adapter)
    except InputError as error:
        raise InputError([Problem("checkpoint.export", str(error), "checkpoint.export=hf does so", "peft")]) from None


def _check_weights(source: str, config: Config) -> None:
    try:
        kind, path = resolved(source)
    except InputError as error:
        raise InputError(f"checkpoint.weights: {error}") from None
    if kind == "megalite":
        _read(str(newest(path)), "checkpoint.weights", config)
    else:
        refuse_other_weights(path, read_model(source), config)
