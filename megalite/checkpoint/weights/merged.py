"""Weights with an adapter merged into them: W of a target becomes W + scale · B A. Imports no torch."""

from dataclasses import replace

import numpy as np

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.store.index import Index, Stored
from megalite.checkpoint.weights.formats.opened import Merging, Weights
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.config.model_schema import Adapter
from megalite.config.schema import Config
from megalite.plan.model.weights import held_weights

BASE = "adapter.base"  # the tensor of an adapter's checkpoint with the number of its base, see `model.fingerprint`


def merged(base: Weights, factors: Weights, adapter: Adapter) -> Weights:
    """The weights of `base` with those that the `factors` of an adapter add. Nothing is read before they are.

    Raises DamagedError if the factors are not those of matrices that the base has.
    """
    if base.training is not None:
        raise InputError("--optimizer: states belong to an adapter, not to what it is merged into; leave it out")
    for name, weight in held_weights(Config(model=base.model, adapter=adapter).model).items():
        found = factors.index.tensors.get(PREFIX + name)
        if found is None or found.shape != weight.shape:
            there = "is not there" if found is None else f"is {list(found.shape)}"
            rule = f"{name} {there}; beside the matrices of {base.path}, it would be {list(weight.shape)}"
            raise DamagedError(factors.path, rule)

    def without_place(stored: Stored) -> Stored:
        return Stored(stored.dtype, stored.shape, np.empty((0, 2 + 2 * len(stored.shape)), np.int64))

    tensors = {name: without_place(stored) for name, stored in base.index.tensors.items()}
    index, merging = Index((), tensors), Merging(factors, adapter)
    return replace(base, index=index, trained=False, factors={}, woven={}, merging=merging, dense=base)
