"""Models between and beyond those of a ladder, by its own rule of shape."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, log

import numpy as np

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.plan.model.size import model_parameters

MAX_WIDTH, MAX_LAYERS = 1 << 18, 1 << 12
SHAPE_WEIGHT = 0.3  # how much a relative difference of width / layers counts beside one of N
HEAD_HALVINGS, HALVING_WEIGHT = 3, 0.02  # factors of two in heads, for tensor parallelism; what one less counts


def size_of(model: Model, definition: str) -> int:
    """N by a name of `settings.DEFINITIONS`."""
    found = model_parameters(model)
    layers = found.attention + found.mlp + found.norms
    if definition == "total":
        return found.total
    # A tied head is the embedding's weight, and computes as one of its own does.
    head = (found.head or found.embedding) if definition == "with_head" else 0
    return layers + head


@dataclass(frozen=True)
class Rule:
    """Derives the shape of models from N.

    Width / layers is interpolated over ln N, and stays beyond the ladder's ends. The width of heads, queries per key,
    and the MLP's width relative to the model's are those of the largest model.
    """

    models: tuple[Model, ...]
    definition: str

    @staticmethod
    def of(models: Sequence[Model], definition: str) -> "Rule":
        """Make the rule of the models of a ladder. Raises InputError where there are none."""
        if not models:
            raise InputError("the ladder has no models to take a shape from: no run folder has a config.yaml")
        return Rule(tuple(sorted(models, key=lambda model: size_of(model, definition))), definition)

    @property
    def largest(self) -> Model:
        return self.models[-1]

    def aspect(self, size: float) -> float:
        """Width / layers of a model of `size` parameters."""
        known = [log(size_of(model, self.definition)) for model in self.models]
        values = [log(model.width / model.layers) for model in self.models]
        return float(np.exp(np.interp(log(size), known, values)))

    def nearest(self, size: float) -> Model:
        """The model that is nearest to `size` parameters, of nearly the width / layers that the rule gives."""
        large, aspect = self.largest, self.aspect(size)
        group = large.heads // large.kv_heads
        unit = large.head_size * group  # unit of widths: whole heads in whole groups
        fine = gcd(*(model.ffn for model in self.models))

        def model(steps: int, layers: int) -> Model:
            width = steps * unit
            ffn = max(round(large.ffn / large.width * width / fine), 1) * fine
            heads = width // large.head_size
            return replace(large, width=width, layers=layers, heads=heads, kv_heads=heads // group, ffn=ffn)

        def deep(steps: int) -> int:
            return min(max(round(steps * unit / aspect), 1), MAX_LAYERS)

        low, high = 1, max(MAX_WIDTH // unit, 1)
        if size_of(model(high, deep(high)), self.definition) < size:
            raise InputError(
                f"N = {size:.3g}: is larger than any model that can be described; ask for a smaller budget"
            )
        while low < high:
            middle = (low + high) // 2
            if size_of(model(middle, deep(middle)), self.definition) < size:
                low = middle + 1
            else:
                high = middle

        def away(candidate: Model) -> float:
            shape = abs(log(candidate.width / candidate.layers / aspect))
            halves = min((candidate.kv_heads & -candidate.kv_heads).bit_length() - 1, HEAD_HALVINGS)
            off = abs(log(size_of(candidate, self.definition) / size))
            return off + SHAPE_WEIGHT * shape + HALVING_WEIGHT * (HEAD_HALVINGS - halves)

        near = [
            model(steps, layers)
            for steps in range(max(low - 4, 1), low + 5)
            for layers in range(max(deep(steps) - 3, 1), deep(steps) + 4)
        ]
        return min(near, key=away)
