"""Factors of initialization and optimizers by a model's size, for each role of a parameter: the one table.

With m the width and l the depth over those of the base model, and l = 1 but for CompleteP:

| parameters                    | initial std                  | AdamW: rate | Muon: rate               | AdamW: ε  |
|-------------------------------|------------------------------|-------------|--------------------------|-----------|
| embedding, head               | σ                            | η           | (AdamW)                  | ε/m       |
| matrices of layers            | σ/√m                         | η/m         | η, match_rms_adamw: η/√m | ε/(m·l)   |
| those into the stream         | σ/√(2·L·m), CompleteP: σ/√m  | η/m         | as above                 | ε/(m·l)   |
| norms and biases of layers    | 1, 0                         | η           | (AdamW)                  | ε/(m·l)   |
| final norm                    | 1                            | η           | (AdamW)                  | ε/m       |

AdamW's update has the size of the rate, whatever the gradient. Outputs are sums of m times as many terms, so a rate of
η/m changes them by as much. Muon's orthogonal update changes outputs by as much at any width if it is scaled with
√(rows/columns), as `spectral` does; `match_rms_adamw` makes it √m times larger. Optimizers decay by rate · λ, so λ is
divided by what the rate is multiplied by. Gradients get smaller as 1/(m·l), and ε with them (Dey et al. 2025, arXiv
2505.01618, table 1). The factors of a forward pass are in `megalite.config.parametrization`.
"""

import math
from dataclasses import dataclass

from megalite.config.model_schema import Model
from megalite.config.parametrization import depth_ratio, width_ratio
from megalite.config.schema import Optim
from megalite.plan.model.optimizer_states import uses_muon
from megalite.plan.parts.roles import Role, RoleKind, Side


@dataclass(frozen=True)
class Scales:
    """The optimizer's settings for one parameter. `lr` is a factor of the learning rate, which schedules change."""

    lr: float
    weight_decay: float
    eps: float


def standard_deviation(model: Model, role: Role) -> float:
    """The standard deviation of the initial values of a matrix.

    Projections into the residual stream begin smaller in deep models (GPT-2's rule), unless CompleteP makes the whole
    branch smaller.
    """
    if role.kind is not RoleKind.MATRIX:
        return model.init_std
    variance = width_ratio(model)
    if role.into_stream and model.parametrization != "completep":
        variance *= 2 * model.layers
    return model.init_std / math.sqrt(variance)


def deviation_of_factor(role: Role, inputs: int) -> float:
    """The standard deviation of the initial values of an adapter's factor, which takes so many features.

    It is that of PEFT: the first factor has a variance of 1/(3 · inputs), 1 for the embedding, and the second is 0.
    """
    if role.inputs is Side.ADAPTER:
        return 0.0
    return 1.0 if role.kind is RoleKind.EMBEDDING else 1 / math.sqrt(3 * inputs)


def scales(model: Model, optim: Optim, role: Role) -> Scales:
    """The optimizer's settings for a parameter of this role."""
    lr = _rate(model, optim, role)
    shrinking = width_ratio(model) * (depth_ratio(model) if role.in_layer else 1.0)
    return Scales(lr, optim.weight_decay / lr if role.decays else 0.0, optim.eps / shrinking)


def _rate(model: Model, optim: Optim, role: Role) -> float:
    """Factor of the learning rate."""
    if role.kind is not RoleKind.MATRIX or role.adapts:
        return 1.0
    if not uses_muon(optim, role):
        return 1 / width_ratio(model)
    return 1 / math.sqrt(width_ratio(model)) if optim.muon.scale == "match_rms_adamw" else 1.0
