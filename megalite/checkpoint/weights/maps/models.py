"""Models as other programs describe them: whether they can be, and what of ours is lost there. Imports no torch."""

from dataclasses import replace
from typing import Any

from megalite.base.errors import InputError
from megalite.config.convert import leaves, to_plain
from megalite.config.rules.model import model_rules
from megalite.config.rules.ranges import range_rules
from megalite.config.schema import Config, Model


def checked(model: Model, file: str) -> Model:
    """The model that `file` means. Raises InputError if it breaks a rule."""
    problems = [*range_rules(to_plain(Config(model=model))), *model_rules(model)]
    if problems:
        raise InputError(f"{file}: means a model that cannot be: {'; '.join(map(str, problems))}")
    return model


def plain_model(model: Model) -> dict[str, Any]:
    """The model's keys and values, where a head's width is always told, and a window only if some layer has it."""
    attention = model.attention
    if attention.full_every == 1:
        attention = replace(attention, window=None, full_every=None)
    told = replace(model, head_width=model.head_size, attention=attention)
    return dict(leaves(to_plain(Config(model=told))["model"], "model"))


def lost(model: Model, again: Model) -> list[str]:
    """The keys of `model`, with their values, that `again`, which came back from another description, does not have."""
    ours, theirs = plain_model(model), plain_model(again)
    return [f"{key} = {value}" for key, value in ours.items() if key not in theirs or theirs[key] != value]
