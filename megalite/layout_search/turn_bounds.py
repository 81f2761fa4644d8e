"""Seconds that layers take at least where forward and backward passes take turns (`cost.turns`). Imports no torch.

Two passes in turns compute for C seconds in all and send for X. A sum of the longer of both and a share o of the other
is at least C + o·X, and at least o·C + X; so it is for what one of them sends, beside what the other computes. With h
seconds of launches, (P³ + h³)^(1/3) is at least a·P + b·h wherever a^1.5 + b^1.5 = 1. These are sums over layers, so
those of stages add up, whatever is paired. Which of them is highest is found for the whole model.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from megalite.cost.kernels import launched
from megalite.cost.layer import LayerTime
from megalite.cost.turns import LayerPass, StagePass, in_turns


class Pairs:
    """Seconds of both passes of two stages in turns, without exchanges of weights. layers: of each kind."""

    def __init__(self, layers: Sequence[LayerTime], beside: Callable[[float, float], float]) -> None:
        self._layers, self._beside = layers, beside
        self._known: dict[tuple[Sequence[int], Sequence[int]], float] = {}

    def of(self, one: Sequence[int], other: Sequence[int]) -> float:
        """Stages with so many layers of each kind, in the order of kinds."""
        if (one, other) not in self._known:
            (first, first_back), (second, second_back) = map(self._passes, (one, other))
            self._known[one, other] = sum(
                in_turns(*pair, 0.0, (0.0,)).total for pair in ((first, second_back), (second, first_back))
            )
        return self._known[one, other]

    def _passes(self, counts: Sequence[int]) -> list[StagePass]:
        layers = [time.turns for time, count in zip(self._layers, counts, strict=True) for _ in range(count)]
        return [
            StagePass(tuple(turns[at] for turns in layers), 0.0, 0.0, 0.0, 0.0, (0.0,), self._beside) for at in (0, 1)
        ]


class _Sums(NamedTuple):
    """Seconds of a pass: that it computes before it sends and after, and while it sends; for which it sends; and of
    launches."""

    main: float
    own: float
    sent: float
    launches: float


def least_in_turns(layers: Sequence[tuple[LayerTime, int]], overlap: float) -> list[tuple[float, float]]:
    """Forward and backward of each layer. layers: those of the model, with their counts. overlap: as in `Constants`."""
    sums = [tuple(map(_sums, time.turns)) for time, _ in layers]
    counts = [count for _, count in layers]
    best, passes = -1.0, list[tuple[float, float]]()
    for there, back in product(((1.0, overlap), (overlap, 1.0)), repeat=2):  # by what is sent forward, and backward

        def of_pass(each: _Sums, own: tuple[float, float], other: tuple[float, float]) -> float:
            return other[0] * each.main + own[0] * each.own + own[1] * each.sent

        found = [(of_pass(forward, there, back), of_pass(backward, back, there)) for forward, backward in sums]
        if (total := _total(found, counts)) > best:
            best, passes = total, found
    host = _total([(forward.launches, backward.launches) for forward, backward in sums], counts)
    both = launched(best, host)
    device, launches = (best / both) ** 2, (host / both) ** 2
    return [
        (device * one + launches * forward.launches, device * other + launches * backward.launches)
        for (one, other), (forward, backward) in zip(passes, sums, strict=True)
    ]


def _sums(each: LayerPass) -> _Sums:
    stretches = each.stretches
    main = each.rest + sum(stretch.compute for stretch in stretches)
    return _Sums(
        main, sum(stretch.own for stretch in stretches), sum(stretch.sent for stretch in stretches), each.launches
    )


def _total(passes: Iterable[tuple[float, float]], counts: Iterable[int]) -> float:
    return sum(count * (forward + backward) for (forward, backward), count in zip(passes, counts, strict=True))
