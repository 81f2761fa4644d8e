"""Weights of a dense model seen as those of a model with experts; see `maps.upcycled`. Imports no torch."""

from dataclasses import replace

import numpy as np

from megalite.base.errors import InputError
from megalite.checkpoint.store.index import Index, Stored
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.safetensors import INDEX
from megalite.checkpoint.weights.maps.families import CONFIG
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.maps.upcycled import BEGUN, dense_name, upcycling
from megalite.config.model_schema import Model
from megalite.plan.model.weights import weights
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import ROUTER


def upcycled(found: Weights, model: Model, noise: float = 0.0, seed: int = 0) -> Weights:
    """The weights of `model`, made of those of a dense one. Nothing is read before they are. Raises InputError."""
    if found.training is not None:
        raise InputError("--optimizer: states belong to the dense model's weights; leave it out, or --upcycle")
    found = found.folded()
    way = upcycling(found.model, model, noise, seed)

    def stored(name: str, weight: Weight) -> Stored:
        if weight.role in BEGUN:
            dtype = found.dtype if weight.role == ROUTER else "float32"
        elif dense_name(name) == name:
            return found.index.tensors[PREFIX + name]
        else:
            dtype = found.index.tensors[PREFIX + dense_name(name)].dtype
        return Stored(dtype, weight.shape, np.empty((0, 2 + 2 * len(weight.shape)), np.int64))

    return replace(
        found,
        model=model,
        index=Index((), {PREFIX + name: stored(name, weight) for name, weight in weights(model).items()}),
        family=None,
        companions=tuple(file for file in found.companions if file.name not in (CONFIG, INDEX)),
        trained=False,
        factors={},
        upcycling=way,
        dense=found,
    )
