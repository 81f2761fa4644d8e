"""Metrics of experts: how evenly tokens choose them, and which ones hardly any token chooses."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import number_ranges

Load = NDArray[np.int64]  # layers with experts, experts
WINDOW_STEPS = 100  # steps after which experts are judged
STARVED_SHARE = 0.1  # share of an even one of tokens, below which an expert is starved
MAX_LISTED_LAYERS = 8  # layers that a warning lists


class LoadMeter:
    """Sums loads of experts over the steps between two reports, and over windows of `WINDOW_STEPS` steps.

    layers: numbers of the layers with experts, of which each has `count`.
    """

    def __init__(self, layers: Sequence[int], count: int) -> None:
        self.layers, self._none = layers, np.zeros((len(layers), count), np.int64)
        self.latest = self._interval = self._window = self._none
        self._steps, self._starved = 0, frozenset[tuple[int, int]]()

    def add(self, load: Sequence[int]) -> dict[int, list[int]]:
        """Add the load of a step. Returns, at the end of a window, newly starved experts by layer."""
        new = np.array(load, np.int64).reshape(self._none.shape)
        self._interval, self._window = self._interval + new, self._window + new
        self._steps += 1
        if self._steps < WINDOW_STEPS:
            return {}
        before, now = self._starved, np.argwhere(starved(self._window)).tolist()
        self._starved = frozenset((row, expert) for row, expert in now)
        self._window, self._steps = self._none, 0
        found: dict[int, list[int]] = {}
        for row, expert in sorted(self._starved - before):
            found.setdefault(self.layers[row], []).append(expert)
        return found

    def read(self) -> dict[str, float]:
        """The values that docs/metrics.md lists, of the steps since the last call, whose loads are `latest` then."""
        self.latest, self._interval = self._interval, self._none
        return values_of(self.layers, self.latest) if self.latest.any() else {}


def values_of(layers: Sequence[int], load: Load) -> dict[str, float]:
    """The values of a record: of all layers together, then of each."""
    shares = load / load.sum(1, keepdims=True)
    most = shares.max(1) * load.shape[1]
    logarithms = np.log(np.where(shares > 0, shares, 1.0))
    entropy = -(shares * logarithms).sum(1) / np.log(load.shape[1])
    number = starved(load).sum(1)
    found = {"expert_load": most.max(), "expert_entropy": entropy.min(), "experts_starved": number.sum()}
    for row, layer in enumerate(layers):
        of_layer = {"expert_load": most, "expert_entropy": entropy, "experts_starved": number}
        found |= {f"{name}/{layer}": values[row] for name, values in of_layer.items()}
    return {name: float(value) for name, value in found.items()}


def starved(load: Load) -> NDArray[np.bool_]:
    """Tell which experts have less than `STARVED_SHARE` of their even share of tokens."""
    found: NDArray[np.bool_] = load * load.shape[1] < STARVED_SHARE * load.sum(1, keepdims=True)
    return found


def starved_text(found: dict[int, list[int]]) -> str:
    """Say which experts starve, and what helps."""
    some = [f"layer {layer}: {number_ranges(experts)}" for layer, experts in list(found.items())[:MAX_LISTED_LAYERS]]
    more = f", and in {len(found) - MAX_LISTED_LAYERS} more layers" if len(found) > MAX_LISTED_LAYERS else ""
    return (
        f"experts starve, {'; '.join(some)}{more}: less than {STARVED_SHARE:.0%} of an even share of tokens chose them "
        f"in {WINDOW_STEPS} steps; model.experts.correction_rate or balance_loss evens that out"
    )
