"""Checks whether a checkpoint holds the tensors that are wanted. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence

from megalite.base.errors import listing
from megalite.checkpoint.store.index import Index
from megalite.config.model_schema import Model
from megalite.plan.model.weights import held_weights

LISTED_NAMES = 5  # names of differing tensors
FLOATS = ("float64", "float32", "bfloat16", "float16")  # data types of weights that other programs have saved


def differences(index: Index, shapes: Mapping[str, Sequence[int]], dtypes: Collection[str]) -> str:
    """The tensors of `shapes` that are missing, of another shape, or of none of `dtypes`, as text; empty if none is."""
    return _listed(_differing(index, shapes, dtypes))


def differences_from(index: Index, model: Model) -> str:
    """Describe how the tensors `model.*` differ from what checkpoints of `model` hold; empty if they do not."""
    shapes = {f"model.{name}": weight.shape for name, weight in held_weights(model).items()}
    more = [name for name in index.tensors if name.startswith("model.") and name not in shapes]
    return _listed(_differing(index, shapes, FLOATS) + [f"{name} is no weight of it" for name in more])


def _differing(index: Index, shapes: Mapping[str, Sequence[int]], dtypes: Collection[str]) -> list[str]:
    found = []
    for name, shape in shapes.items():
        there = index.tensors.get(name)
        if there is None or there.shape != tuple(shape) or there.dtype not in dtypes:
            kind = "missing" if there is None else f"{there.dtype} {list(there.shape)}"
            found.append(f"{name} {kind} instead of {listing(sorted(dtypes))} {list(shape)}")
    return found


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - LISTED_NAMES} more" if len(found) > LISTED_NAMES else ""
    return ", ".join(found[:LISTED_NAMES]) + more
