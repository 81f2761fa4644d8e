"""Compares a checkpoint with the run that loads it: what must be the same in both. Imports no torch."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError, Problem
from megalite.checkpoint.store.manifest import Manifest, Source
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.config.convert import to_plain
from megalite.config.layers import adapter_of, targets_of
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.data.order import integer_weights
from megalite.plan.model.weights import held_weights

FREE_KEYS = {  # no tensor's shape or meaning depends on them
    "model.sequence_length",
    "model.init_std",
    "model.experts.balance_loss",
    "model.experts.z_loss",
    "model.mtp.weight",
}


def refuse_other_weights(path: Path, there: Model, here: Config) -> None:
    """Raises InputError where a run cannot begin with weights of the model `there`.

    A run may have fewer layers of multi-token prediction, or none; it leaves the last ones where they are.
    """
    fewer = here.model.depth < there.depth
    refuse_other_model(path, replace(there, mtp=here.model.mtp) if fewer else there, here)


def refuse_other_model(path: Path, there: Model, here: Config) -> None:
    """Raises InputError with every key in which the models differ."""
    old, new = (to_plain(Config(model=model))["model"] for model in (there, here.model))
    if there.head_size == here.model.head_size:  # where it is width / heads, it may be left out
        old["head_width"] = new["head_width"]
    for plain in (old, new):
        if plain["experts"] is not None:
            plain["experts"]["width"] = plain["experts"]["width"] or plain["ffn"]
    rates = [each.experts and each.experts.correction_rate for each in (there, here.model)]
    if None not in rates:  # it may change, as a learning rate does
        old["experts"]["correction_rate"] = rates[1]
    problems = [
        Problem(key, f"the checkpoint {path} has {json.dumps(had)}", "use that, or begin a run with new weights", value)
        for key, had, value in _differences(old, new, "model")
        if key not in FREE_KEYS
    ]
    if problems:
        raise InputError(problems)


def _differences(old: dict[str, Any], new: dict[str, Any], section: str) -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys of a section whose values differ, with both values; a section that one of them lacks is one."""
    for name, value in new.items():
        key, had = f"{section}.{name}", old[name]
        if isinstance(had, dict) and isinstance(value, dict):
            yield from _differences(had, value, key)
        elif had != value:
            yield key, had, value


def refuse_other_run(path: Path, manifest: Manifest, here: Config, data: tuple[Source, ...]) -> None:
    """Raises InputError unless the run `here`, which reads `data`, can go on from the checkpoint `path`."""
    refuse_other_model(path, manifest.configuration.model, here)
    refuse_other_adapter(path, manifest.configuration, here)
    refuse_other_data(path, manifest, here, data)
    refuse_other_optimizer(path, manifest.configuration, here)


def refuse_other_adapter(path: Path, there: Config, here: Config) -> None:
    """Raises InputError where one of both has an adapter and the other has none, or another."""
    old, new = there.adapter, here.adapter
    if old is None or new is None:
        if old is not new:
            rule = f"the checkpoint {path} has {'an adapter' if old else 'the whole model'}"
            fix = "use the same, or begin a new run with checkpoint.weights"
            raise InputError([Problem("adapter", rule, fix, None if new is None else vars(new))])
        return
    known = set(targets_of(here.model))
    same = {"weights", "dropout"}  # from which a run has begun; and which may change, as a learning rate does
    if adapter_of(old).targets & known == adapter_of(new).targets & known:
        same.add("targets")
    problems = [
        Problem(
            f"adapter.{name}", f"the checkpoint {path} has {json.dumps(had)}", "use that, or begin a new run", value
        )
        for name, had, value in ((name, had, getattr(new, name)) for name, had in vars(old).items())
        if had != value and name not in same
    ]
    if problems:
        raise InputError(problems)


def refuse_other_factors(source: str, found: Weights, here: Config) -> None:
    """Raises InputError unless `found`, opened at `source`, has factors with which a run can begin."""
    there, wanted = found.merging, here.model.adapter
    if there is None or wanted is None:
        raise InputError([Problem("adapter.weights", "has no adapter", "name a run with one, or peft:PATH", source)])
    scales = {adapter_of(each).scale for each in (there.adapter, wanted)}
    old, new = (held_weights(Config(model=here.model, adapter=each).model) for each in (there.adapter, wanted))
    if old != new or len(scales) > 1:
        has = there.adapter
        rule = f"has rank {has.rank}, alpha {has.alpha:g}, dora {str(has.dora).lower()}, targets {has.targets}"
        raise InputError([Problem("adapter.weights", rule, "use the same rank, alpha, rslora, dora, targets", source)])


def refuse_other_optimizer(path: Path, there: Config, here: Config) -> None:
    """Raises InputError where the states of the optimizers have other names."""
    old, new = there.optim.name, here.optim.name
    if old != new:
        rule = f"the checkpoint {path} has the states of {old}"
        fix = f"use {old}, or begin a new run from its weights with {_key_of_weights(there)}={path}"
        raise InputError([Problem("optim.name", rule, fix, new)])


def _key_of_weights(there: Config) -> str:
    """The key by which a new run begins with what a checkpoint holds: all weights, or an adapter's factors."""
    return "checkpoint.weights" if there.adapter is None else "adapter.weights"


def refuse_other_data(path: Path, manifest: Manifest, here: Config, data: tuple[Source, ...]) -> None:
    """Raises InputError unless sample i is the same for both: else a position in the data would mean other samples.

    Batch sizes, ramp-up, curriculum and layout may differ: the position counts samples. The data of another program is
    unknown, so that only the length of its samples is compared.
    """
    if not manifest.resumable:
        raise InputError(
            f"{path}: another program has saved it, without the state of a run; "
            f"begin a new run from its weights with checkpoint.weights={path}"
        )
    there = manifest.configuration
    pairs: dict[str, tuple[Any, Any]] = {
        "model.sequence_length": (there.model.sequence_length, here.model.sequence_length)
    }
    if not manifest.foreign:
        pairs["run.seed"] = there.run.seed, here.run.seed
        pairs["data.train"] = _mixture(manifest.data), _mixture(data)
    remedy = f"or begin a new run from its weights with {_key_of_weights(there)}"
    problems = [
        Problem(key, f"the checkpoint {path} was trained with {old}; samples would repeat or be left out", remedy, new)
        for key, (old, new) in pairs.items()
        if old != new
    ]
    if not problems and not manifest.foreign:
        problems = [
            Problem(f"data.train[{number}].path", f"holds other tokens than when {path} was saved", remedy, new.path)
            for number, (old, new) in enumerate(zip(manifest.data, data, strict=True))
            if old.fingerprint != new.fingerprint
        ]
    if problems:
        raise InputError(problems)


def _mixture(data: tuple[Source, ...]) -> str:
    """The weights of the sources, in the order in which they are listed, as smallest whole numbers."""
    weights = integer_weights([source.weight for source in data]) if data else ()
    return f"{len(data)} sources weighted {' : '.join(map(str, weights))}"
