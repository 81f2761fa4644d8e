"""Multipliers of the forward pass, so that a model of any size behaves as the base model does.

muP (Yang et al. 2022, arXiv 2203.03466) keeps activations and their changes as large at any width. CompleteP (Dey et
al. 2025, arXiv 2505.01618) does so at any depth, too. `megalite.plan.model.parametrization` has the multipliers of
initialization and optimizers, by the role of a parameter.
"""

import math
from dataclasses import dataclass

from megalite.config.model_schema import Model


def width_ratio(model: Model) -> float:
    """Ratio of the model's width to that of its base. It is 1 in the standard parametrization."""
    base = model.base
    if model.parametrization == "standard" or base is None or not base.width:
        return 1.0
    return model.width / base.width


def depth_ratio(model: Model) -> float:
    """Ratio of the model's depth to that of its base. It is 1 except in CompleteP."""
    base = model.base
    if model.parametrization != "completep" or base is None or not base.layers:
        return 1.0
    return model.layers / base.layers


@dataclass(frozen=True)
class Multipliers:
    """Multipliers of one model, the same in every layout.

    embedding: of the embedding's output. scores: of products of queries and keys; None: 1/√(width of a head). branch:
    of what attention and MLP each add to the residual stream. logits: of logits, before a cap.
    """

    embedding: float = 1.0
    scores: float | None = None
    branch: float = 1.0
    logits: float = 1.0


def multipliers(model: Model) -> Multipliers:
    """The multipliers of a model.

    Scores are multiplied by √(base head width) / (head width): queries and keys of wide heads grow alike in training,
    so that their product grows with the width, not with its root (arXiv 2203.03466, definition 4.1).
    """
    return Multipliers(
        embedding=model.embedding_multiplier,
        scores=_scores(model),
        branch=1 / depth_ratio(model),
        logits=model.logits_multiplier / width_ratio(model),
    )


def _scores(model: Model) -> float | None:
    base = model.base
    if model.parametrization == "standard" or base is None or base.head_width in (None, model.head_size):
        return model.attention.scale
    assert base.head_width is not None
    return math.sqrt(base.head_width) / model.head_size
