"""Seconds that a pipeline takes at least, from the chains of actions that wait for each other. Imports no torch.

A rank begins when the first micro-batch has come through all stages before its own, then computes all micro-batches.
Where backward passes are whole, the gradients of the last one go back through those stages afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Passes:
    """Seconds of a model's passes for one micro-batch.

    forward, backward: of all layers before each, and at last of all. embedding, head: forward and backward. weights:
    of all backward passes, what a split one leaves to W.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    embedding: tuple[float, float]
    head: tuple[float, float]
    weights: float

    @property
    def there(self) -> float:
        return self.forward[-1] + self.embedding[0] + self.head[0]

    @property
    def back(self) -> float:
        return self.backward[-1] + self.embedding[1] + self.head[1]

    @property
    def layers(self) -> int:
        return len(self.forward) - 1

    @property
    def shortest_backward(self) -> float:
        """Of the layer whose backward pass takes least."""
        return min(after - before for before, after in pairwise(self.backward))

    @property
    def shortest(self) -> float:
        """Of the layer that takes least, both passes."""
        both = [there + back for there, back in zip(self.forward, self.backward, strict=True)]
        return min(after - before for before, after in pairwise(both))

    def first_waits(self, ranks: int, layers: int) -> float:
        """Seconds until a rank's first pass, on average, where each stage before has at least so many layers."""
        if ranks == 1 or not layers:
            return 0.0
        embedding = self.embedding[0] * (ranks - 1)
        return (sum(self.forward[: ranks * layers : layers]) + embedding) / ranks

    def one_after_all(self, m: int, first: int) -> float:
        """Seconds of a split pipeline whose first stage has `first` layers: one micro-batch's way, the rest at its end.

        No micro-batch comes back to the first stage before it has gone all the way, and then all of the first stage's
        backward passes are left; likewise, the last micro-batch sets out when all of its forward passes are done.
        """
        there, back = self.forward[first] + self.embedding[0], self.backward[first] + self.embedding[1]
        return self.there + self.back - self.weights + max((m - 1) * there, (m - 1) * back)


@dataclass(frozen=True)
class Chain:
    """What a pipeline rank waits for and does. busy: seconds of a micro-batch. wait: before its first one and after
    its last one."""

    layers: int
    busy: float
    wait: float


def chains(passes: Passes, split: Sequence[int], placement: Sequence[int], whole: bool) -> list[Chain]:
    """Of the ranks of a pipeline: those that may take longest.

    split, placement: by stage, its layers and its rank. whole: whether backward passes are.
    """
    stages, waited = len(split), 0.0
    ends = list(accumulate(split, initial=0))
    layers, busy, wait = dict[int, int](), dict[int, float](), dict[int, float]()
    for stage, rank in enumerate(placement):
        first, last = ends[stage], ends[stage + 1]
        there = passes.forward[last] - passes.forward[first]
        back = passes.backward[last] - passes.backward[first]
        for place, end in ((0, passes.embedding), (stages - 1, passes.head)):
            if stage == place:
                there, back = there + end[0], back + end[1]
        wait.setdefault(rank, waited)
        layers[rank] = layers.get(rank, 0) + split[stage]
        busy[rank] = busy.get(rank, 0.0) + there + back
        waited += there + back * whole
    longest: dict[tuple[int, float], float] = {}
    for rank, seconds in busy.items():
        key = layers[rank], round(seconds, 12)
        longest[key] = max(longest.get(key, 0.0), wait[rank])
    return [Chain(count, seconds, waiting) for (count, seconds), waiting in longest.items()]
