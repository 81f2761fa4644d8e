"""The time of collectives, by the links that a group of ranks really spans. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from megalite.planner.constants import FITTED, Constants
from megalite.planner.hardware import Cluster

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
ROUNDS: dict[Collective, int] = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. stride: how far apart neighbours in the group are, in ranks of the job."""

    size: int
    stride: int


@dataclass(frozen=True)
class Net:
    """Times of communication in a cluster, in seconds."""

    cluster: Cluster
    constants: Constants = FITTED

    def collective(self, kind: Collective, whole: float, group: Group) -> float:
        """A collective on a tensor that has `whole` bytes when no rank's part is left out."""
        if group.size <= 1:
            return 0.0
        moved = (group.size - 1) / group.size * whole
        return ROUNDS[kind] * (moved / self.bandwidth(group) + self._start(group))

    def broadcasts(self, whole: float, group: Group) -> float:
        """Each rank of the group in turn sends its part of `whole` bytes to all others."""
        if group.size <= 1:
            return 0.0
        return whole / self.bandwidth(group) + group.size * self._start(group)

    def transfer(self, size: float, distance: int) -> float:
        """Sending `size` bytes to the rank that is `distance` ranks away."""
        pair = Group(2, distance)
        return size / self.bandwidth(pair) + self._start(pair)

    def bandwidth(self, group: Group) -> float:
        """Bytes/s that every rank of the group can send, when all send at once to their neighbours in a ring."""
        slowest, near = float("inf"), 1
        for level in self.cluster.levels:
            inside = max(1, min(group.size, level.gpus // group.stride))
            if inside > near:  # the ring runs through this level, with as many lanes as members lie nearer together
                slowest = min(slowest, near * level.link.reached * self.constants.node)
                near = inside
        if group.size > near:
            slowest = min(slowest, near * self.cluster.network.bandwidth * self.constants.network)
        return slowest

    def _start(self, group: Group) -> float:
        """Until the first element has been around a ring: a launch, and a hop between each two neighbours."""
        near = max(1, min(group.size, self.cluster.gpus_per_node // group.stride))
        between = -(-group.size // near) - 1  # hops from node to node
        inside = group.size - 1 - between
        node, network = self.cluster.levels[-1].link.latency, self.cluster.network.latency
        return self.constants.launch + self.constants.hop * (inside * node + between * network)
