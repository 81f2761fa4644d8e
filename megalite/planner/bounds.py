"""Seconds that a pipeline takes at least, from the chains of actions that wait for each other. Imports no torch.

A rank begins when the first micro-batch has come through all stages before its own, then computes all micro-batches.
Where backward passes are whole, the gradients of the last one go back through those stages afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megalite.schedule.generate import V_SHAPED


@dataclass(frozen=True)
class Passes:
    """Seconds of a model's passes for one micro-batch.

    forward, backward: of all layers before each, and at last of all. weights: likewise of backward, what a split one
    leaves to W. embedding, head: forward, backward, and of that the weights' share.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    embedding: tuple[float, float, float]
    head: tuple[float, float, float]

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

    def split_back(self, schedule: str, m: int, split: Sequence[int]) -> float:
        """Seconds of a pipeline whose backward passes are split, from the way of a single micro-batch.

        No micro-batch comes back to the first stage before it has gone all the way, and then all of the first stage's
        backward passes are left; likewise, the last micro-batch sets out when all of its forward passes are done.
        """
        first = split[0]
        there, back = self.forward[first] + self.embedding[0], self.backward[first] + self.embedding[1]
        way = self.there + self.back - self.weights[-1] - self.head[2] + (m - 1) * max(there, back)
        if schedule not in V_SHAPED:
            return way
        counts = longest_path(schedule, len(split) // 2, m)
        return max(
            way, sum(count * seconds for count, seconds in zip(counts, self._shortest_stage(split), strict=True))
        )

    def _shortest_stage(self, split: Sequence[int]) -> tuple[float, float, float]:
        """Seconds that F, I and W take at least, whatever the stage."""
        ends = list(accumulate(split, initial=0))
        stages = []
        for stage, (first, last) in enumerate(pairwise(ends)):
            times = [each[last] - each[first] for each in (self.forward, self.backward, self.weights)]
            for place, end in ((0, self.embedding), (len(split) - 1, self.head)):
                if stage == place:
                    times = [time + more for time, more in zip(times, end, strict=True)]
            stages.append((times[0], times[1] - times[2], times[2]))
        forward, inputs, weights = (min(times) for times in zip(*stages, strict=True))
        return forward, inputs, weights


def longest_path(schedule: str, p: int, m: int) -> tuple[int, int, int]:
    """How many F, I and W lie on a path through a V-shaped schedule: a longest one while the pipeline is not full.

    No times of stages make a step shorter than any path. A test finds these paths in the schedules.
    """
    if schedule == "zbv":
        return 2 * max(m, p), 2 * (p + m - 1), 2 * min(m, p)
    if m <= p:
        return 2 * p, 2 * (p + m - 1), 2 * m + p - 1
    return 2 * m - 1, 2 * (p + m - 1), 3 * p + 1


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
