"""Seconds that a pipeline takes at least, from the chains of actions that wait for each other. Imports no torch.

A rank begins when the first micro-batch has come through all stages before its own, then computes all micro-batches.
Where backward passes are whole, the gradients of the last one go back through those stages afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from megalite.cost.stages import ZERO_BUBBLES
from megalite.schedule.generate import V_SCHEDULES

Counts = tuple[int, ...]  # layers, or stages by that of their first layer: by kind of layer
ROUNDING = 1e-9  # share of a layer that is added before layers are rounded down


def summed(counts: Sequence[int], each: Sequence[float]) -> float:
    """The sum over layers. counts: layers of each kind. each: what one of these has."""
    return sum(map(mul, counts, each))


@dataclass(frozen=True)
class Passes:
    """Seconds of a model's passes for one micro-batch.

    forward, backward: of all layers before each, and at last of all. weights: likewise of backward, what a split one
    leaves to W. kinds, embedding, head: forward, backward, and of that the weights' share; of a layer of each kind.
    launches: of the host, for all layers.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    kinds: tuple[tuple[float, float, float], ...]
    embedding: tuple[float, float, float]
    head: tuple[float, float, float]
    launches: float

    @cached_property
    def there(self) -> float:
        return self.forward[-1] + self.embedding[0] + self.head[0]

    @cached_property
    def back(self) -> float:
        return self.backward[-1] + self.embedding[1] + self.head[1]

    @cached_property
    def layers(self) -> int:
        return len(self.forward) - 1

    def of(self, counts: Sequence[int], ends: tuple[bool, bool]) -> tuple[float, float]:
        """Forward and backward of so many layers of each kind; ends: with the embedding, and with the head."""
        there = back = 0.0
        for count, (forward, backward, _) in zip(counts, self.kinds, strict=True):
            there += count * forward
            back += count * backward
        if ends[0]:
            there, back = there + self.embedding[0], back + self.embedding[1]
        if ends[1]:
            there, back = there + self.head[0], back + self.head[1]
        return there, back

    def weights_of(self, counts: Sequence[int], ends: tuple[bool, bool]) -> float:
        """Seconds of the weights' share in their backward passes."""
        layers = sum(count * kind[2] for count, kind in zip(counts, self.kinds, strict=True))
        return layers + ends[0] * self.embedding[2] + ends[1] * self.head[2]

    @cached_property
    def shortest(self) -> float:
        """Seconds of both passes of the layer that takes least."""
        return min(kind[0] + kind[1] for kind in self.kinds)

    def first_waits(self, ranks: int, layers: int, more: float) -> float:
        """Seconds until a rank's first pass, on average, where each stage before has at least so many layers.

        more: seconds that each of these stages takes beside its layers.
        """
        if ranks == 1 or not layers:
            return 0.0
        embedding = self.embedding[0] * (ranks - 1)
        return (sum(self.forward[: ranks * layers : layers]) + embedding) / ranks + more * (ranks - 1) / 2

    def split_way(self, longer: float) -> float:
        """Seconds of a single micro-batch through all stages and back, where weight gradients can wait.

        longer: what halves of a pass take for one second of the whole.
        """
        return self.there + longer * (self.back - self.weights[-1] - self.head[2])

    def split_back(
        self, schedule: str, m: int, split: Sequence[int], longer: float, shortest: tuple[float, float, float]
    ) -> float:
        """Seconds of a pipeline whose backward passes are split.

        No micro-batch comes back to the first stage before it has gone all the way, and then all of the first stage's
        backward passes are left; likewise, the last micro-batch sets out when all of its forward passes are done.
        shortest: what F, I and W take at least, whatever the stage.
        """
        first = split[0]
        there, back = self.forward[first] + self.embedding[0], self.backward[first] + self.embedding[1]
        way = self.split_way(longer) + (m - 1) * max(there, back)
        if schedule not in V_SCHEDULES:
            return way
        counts, (forward, inputs, weights) = longest_path(schedule, len(split) // 2, m), shortest
        return max(way, counts[0] * forward + longer * (counts[1] * inputs + counts[2] * weights))


def slowest(layers: int, ranks: int, layer: float, head: float) -> float:
    """Seconds of the slowest of some pipeline ranks at least, whatever the split of `layers` layers.

    layer, head: seconds of a layer, and of the head, which one of the ranks has.
    """
    others, ends = ranks - 1, head / layer
    whole = layers // ranks  # layers in this time, if a rank without the head is the slowest
    while others * whole + max(0, int(whole - ends + ROUNDING)) < layers:
        whole += 1
    beside = max(0, int(layers / ranks - ends) - 1)  # and if it is that with the head
    while others * int(beside + ends + ROUNDING) + beside < layers:
        beside += 1
    return min(whole, beside + ends) * layer


def slowest_waiting(
    layers: int, ranks: int, stages: int, layer: float, ends: tuple[float, float], before: float
) -> float:
    """Seconds as in `slowest`, of ranks that wait for others' layers; stages are filled evenly and form no V.

    A rank begins when the first stages of all ranks before have computed. So in T seconds it has at most
    (T - before · their layers) / layer of its own, of which its first stage has 1 / stages, rounded down: in all, as
    many layers as fewer ranks without waiting.

    stages: of each rank. layer, ends: seconds of a layer, and of embedding and head as stages of the first rank are
    filled by them and the last one has it, for all micro-batches. before: seconds that each layer before takes.
    """
    embedding, head = ends
    if not before:
        return (layers * layer + head) / ranks
    share = before / (stages * layer)
    left = 1 - share
    working = (1 - left**ranks) / share
    rounded = (stages - 1) / stages * ((ranks - working) + embedding / layer * (1 - left ** (ranks - 1))) / share
    return (layers * layer + head - before * rounded) / working


def longest_path(schedule: str, p: int, m: int) -> tuple[int, int, int]:
    """Numbers of F, I and W on a path through a V-shaped schedule: a longest one while the pipeline is not full.

    Whatever the stages' times, a step is at least as long as every path. A test finds these paths in the schedules.
    """
    if schedule == "zbv":
        return 2 * max(m, p), 2 * (p + m - 1), 2 * min(m, p)
    if m <= p:
        return 2 * p, 2 * (p + m - 1), 2 * m + p - 1
    return 2 * m - 1, 2 * (p + m - 1), 3 * p + 1


def halved(schedule: str, split: Sequence[int], m: int) -> tuple[int, int]:
    """Lower bounds of split backward passes among m micro-batches: of any stage, and summed over all layers.

    A test counts them in the schedules.
    """
    layers, fewest, p = sum(split), min(split), len(split) // 2
    if schedule in ZERO_BUBBLES:
        return m, m * layers
    if schedule != "dualpipev" or m < 2 * p:
        return 0, 0
    return p // 2, fewest * p * (3 * p - 1) // 2 + (layers - 2 * p * fewest) * (p // 2)


class Moved(NamedTuple):
    """Seconds in which data-parallel ranks gather weights, reduce gradients over shards, and sum them over replicas;
    to copy what was gathered; and for each micro-batch, to add or copy gradients."""

    gathered: float
    reduced: float
    summed: float
    copied: float
    added: float


class Exchanged(NamedTuple):
    """Traffic of parts of a model: of a layer of each kind, the least of these, the embedding (or the head), and all
    layers. last: seconds for each parameter of a rank at the end of a step."""

    kinds: tuple[Moved, ...]
    least: Moved
    end: Moved
    all: Moved
    last: float


class Work(NamedTuple):
    """Work of a pipeline rank, or of some stages. ends: whether the embedding and the head are among it. edges: stages,
    but for the model's first, by the kind of their first layer."""

    layers: Counts
    ends: tuple[bool, bool]
    edges: Counts


class Chain(NamedTuple):
    """Waits and work of a pipeline rank.

    there, back: seconds of a micro-batch. wait: seconds of compute before its first one and after its last one. before:
    work of the stages that it waits for. hops: their passes that have their input from another rank. first: layers of
    the first stage of its own. fewest: of any.
    """

    work: Work
    there: float
    back: float
    wait: float
    before: Work
    hops: int
    first: Counts
    fewest: int

    @property
    def busy(self) -> float:
        return self.there + self.back


class Turns(NamedTuple):
    """An interleaved rank, from the first micro-batch that reaches its last stage to the last one that leaves it.

    Meanwhile it does all it does but for passes of its other stages with a round of micro-batches at most, forward
    before and backward after. busy: seconds of a micro-batch. arrives, returns: seconds of compute from the first stage
    to this last one and back. hops: of them each, to other ranks. before: work up to this stage. others: that of its
    other stages; seconds: of both their passes. round: micro-batches.
    """

    work: Work
    busy: float
    arrives: float
    returns: float
    hops: int
    before: Work
    others: Work
    seconds: float
    round: int


class Longer(NamedTuple):
    """Seconds by which passes are longer than their compute, forward and backward: those of a layer of each kind, by
    kind; of the embedding and the head; and each pass of a stage once, by the kind of its first layer."""

    there: tuple[float, ...]
    back: tuple[float, ...]
    embedding: tuple[float, float]
    head: tuple[float, float]
    edges: tuple[float, ...]

    def exceeding(self, work: Work) -> tuple[float, float]:
        """Seconds by which passes of `work` are longer, forward and backward."""
        layers, ends, stages = work
        edges = summed(stages, self.edges)
        there, back = summed(layers, self.there) + edges, summed(layers, self.back) + edges
        if ends[0]:
            there, back = there + self.embedding[0], back + self.embedding[1]
        if ends[1]:
            there, back = there + self.head[0], back + self.head[1]
        return there, back


class Waits(NamedTuple):
    """Waits and work of a shape's layouts with a schedule: the same, however states are shared out.

    chains: waits and work of pipeline ranks. all: work of all. hops: of a micro-batch's way through all stages. back:
    seconds of a pipeline whose backward passes are split; way: of that way and back, for a whole pass or halves. whole,
    total: parameters of the fullest rank, as `Amount` has them.
    """

    chains: list[Chain]
    all: Work
    hops: int
    back: float
    way: float
    whole: float
    total: float
