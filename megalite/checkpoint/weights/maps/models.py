"""Models as other programs describe them: whether they can be, and what of ours is lost there. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megalite.base.errors import InputError
from megalite.config.convert import leaves, to_plain
from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Model
from megalite.config.rules.model import model_rules
from megalite.config.rules.ranges import range_rules
from megalite.config.schema import Config

EXPERTS_RULE = "no original Llama has model.experts; use another kind of files"


def checked(model: Model, file: str) -> Model:
    """The model that `file` means. Raises InputError if it breaks a rule."""
    problems = [*range_rules(to_plain(Config(model=model))), *model_rules(model)]
    if problems:
        raise InputError(f"{file}: means a model that cannot be: {'; '.join(map(str, problems))}")
    return model


def plain_model(model: Model) -> dict[str, Any]:
    """The model's keys and values, but for those that say nothing of what its weights compute.

    The widths of a head and of an expert are always told, a window only if some layer has it, its base of RoPE only if
    its layers turn otherwise than others, and the feed-forward's width only if some layer has no experts. Which layers
    have experts is told in one way.
    """
    attention, experts, ffn = model.attention, model.experts, model.ffn
    if attention.full_every == 1:
        attention = replace(attention, window=None, full_every=None, window_rope_theta=None)
    if attention.window_rope_theta == model.rope_theta and model.rope_scaling is None:
        attention = replace(attention, window_rope_theta=None)
    if experts is not None:
        width = experts.width or ffn
        experts = replace(experts, width=width, balance_loss=0.0, z_loss=0.0)
        if (places := first_and_every(has_experts(model))) is not None:
            experts = replace(experts, first_dense=places[0], every=places[1])
        if all(has_experts(model)):
            ffn = width
    told = replace(model, head_width=model.head_size, attention=attention, experts=experts, ffn=ffn)
    found = dict(leaves(to_plain(Config(model=told))["model"], "model"))
    found.pop("model.mtp.weight", None)
    return found


def is_correction(name: str) -> bool:
    """Return whether our weight `name` is a router's correction, which no optimizer updates."""
    return name.endswith(".mlp.router.correction")


def dtype_of(name: str, dtype: str) -> str:
    """The data type of our weight `name` where others are written in `dtype`.

    A router's correction stays in float32: a step changes it by less than bf16 can tell.
    """
    return "float32" if is_correction(name) else dtype


def has_experts(model: Model) -> list[bool]:
    """By layer: whether it has experts, those of multi-token prediction aside."""
    return [kind.mixture is not None for kind in layer_kinds(model)[: model.layers]]


def first_and_every(mixed: Sequence[bool]) -> tuple[int, int] | None:
    """The keys `first_dense` and the least `every` of a model whose layers have experts so; None: no keys say that."""
    numbers = [number for number, each in enumerate(mixed, 1) if each]
    for every in range(1, len(mixed) + 1) if numbers else ():
        multiples = range(every, len(mixed) + 1, every)
        if len(multiples) >= len(numbers) and [*multiples[-len(numbers) :]] == numbers:
            return multiples[-len(numbers)] - every, every
    return None


def lost(model: Model, again: Model) -> list[str]:
    """The keys of `model`, with their values, that `again`, which came back from another description, does not have.

    The rate at which choices are corrected may be another one: it says nothing of what weights compute.
    """
    ours, theirs, rate = plain_model(model), plain_model(again), "model.experts.correction_rate"
    if None not in (ours.get(rate), theirs.get(rate)):
        theirs[rate] = ours[rate]
    return [f"{key} = {value}" for key, value in ours.items() if key not in theirs or theirs[key] != value]


def refuse_experts(model: Model, files: str) -> None:
    """Raises InputError for a model with experts, of which these files are neither read nor written."""
    if model.experts is not None:
        raise InputError(f"{files}: {EXPERTS_RULE}")


def refuse_mtp(model: Model, files: str) -> None:
    """Raises InputError for a model with multi-token prediction, for which these files have no place."""
    if model.mtp is not None:
        raise InputError(f"{files}: have no place for model.mtp; use hf, or leave its layers out with --without-mtp")


def refuse_latent(model: Model, files: str) -> None:
    """Raises InputError for a model with latent attention, of which these files are neither read nor written."""
    if model.attention.latent is not None:
        raise InputError(f"{files}: no original Llama has model.attention.latent; use another kind of files")
