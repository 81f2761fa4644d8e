"""Initial weights of a model for any implementation: megalite's own values, under the other program's names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megalite.checkpoint.weights.maps.strips import Table, Theirs
from megalite.config.model_schema import Model
from megalite.model.init import fill_normal
from megalite.plan.model.parametrization import standard_deviation
from megalite.plan.model.weights import weights
from megalite.plan.parts.roles import RoleKind

Weights = Mapping[str, Tensor]  # by name


def initial_weights(model: Model, seed: int, device: torch.device) -> dict[str, Tensor]:
    """All weights of a model that has just been built, whole and in float32, by megalite's names."""
    found = {}
    for name, weight in weights(model).items():
        tensor = torch.empty(weight.shape, device=device)
        match weight.role.kind:
            case RoleKind.NORM:
                tensor.fill_(1)
            case RoleKind.BIAS:
                tensor.zero_()
            case _:
                std = standard_deviation(model, weight.role)
                fill_normal(tensor, weight.shape, (0,) * len(weight.shape), std, f"{seed}/{name}")
        found[name] = tensor
    return found


def renamed(ours: Weights, table: Table) -> dict[str, Tensor]:
    """The weights of another program, made of ours. One that is a whole weight of ours shares its memory."""
    return {name: _made(ours, theirs) for name, theirs in table.items()}


def _made(ours: Weights, theirs: Theirs) -> Tensor:
    if len(theirs.strips) == 1:
        strip = theirs.strips[0]
        return _rows(ours[strip.name])[slice(*strip.rows)].view(theirs.shape)
    rows = [_rows(ours[strip.name])[slice(*strip.rows), slice(*strip.columns)] for strip in theirs.strips]
    return torch.cat(rows).view(theirs.shape)


def _rows(weight: Tensor) -> Tensor:
    """The rows that strips count: of a stack of matrices, those of all matrices."""
    return weight.flatten(0, -2) if weight.ndim > 2 else weight
