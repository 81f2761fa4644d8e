"""Weights among the configuration files of a command line, which stand for the model that they are of."""

from collections.abc import Sequence

from megalite.base.errors import InputError, listing
from megalite.base.late_import import import_for_good
from megalite.config.model_schema import Model
from megalite.config.sources import split_kind


def without_weights(arguments: Sequence[str]) -> tuple[list[str], Model | None]:
    """The configuration files, and the model of the weights `KIND:PATH` among them, if there are any."""
    weights = [argument for argument in arguments if split_kind(argument)[0] is not None]
    if len(weights) > 1:
        raise InputError(f"{listing(weights, 'and')}: have a model each; name one of them")
    files = [argument for argument in arguments if argument not in weights]
    # By name and only now: NumPy reads the indexes of weights.
    return files, import_for_good("megalite.checkpoint.weights.sources").read_model(weights[0]) if weights else None
