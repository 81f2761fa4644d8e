"""The time of collectives, by the links that a group of ranks really spans. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

from megalite.cost.cluster import Cluster
from megalite.cost.constants import FITTED_CONSTANTS, Constants

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Kind = Collective | Literal["messages"]  # the last: each rank to the next one of its group
ROUNDS: dict[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
Links = tuple[float, ...]  # seconds for which a rank's links are busy in one direction: those of levels, then network


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. stride: how far apart neighbours in the group are, in ranks of the job."""

    size: int
    stride: int


@dataclass(frozen=True)
class Net:
    """Times of communication in a cluster, in seconds.

    A ring enters and leaves a node by the adapters of all members there. In an all-to-all every GPU's bytes for other
    nodes leave by its own adapter, and a message does likewise.
    """

    cluster: Cluster
    constants: Constants = FITTED_CONSTANTS
    _known: dict[tuple[Kind, Group], Links] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nothing(self) -> Links:
        """Seconds of links none of which is busy."""
        return (0.0,) * (len(self.cluster.levels) + 1)

    def collective(self, kind: Collective, whole: float, group: Group) -> float:
        """Seconds of a collective over `group`. whole: bytes of the full tensor, all ranks' parts together."""
        if group.size <= 1:
            return 0.0
        moved = (group.size - 1) / group.size * whole
        return ROUNDS[kind] * (moved / self.bandwidth(group, kind) + self._start(kind, group))

    def transfer(self, size: float, group: Group) -> float:
        """Each rank of the group sends `size` bytes to the next one; the slowest, which may be on another node."""
        if group.size <= 1:
            return 0.0
        return size / self.bandwidth(group, "messages") + self._hop(group)

    def links(self, kind: Kind, whole: float, group: Group) -> Links:
        """Seconds that a collective, or a message, keeps each link busy, its start included."""
        shares = self._shares(kind, group)
        if group.size <= 1:
            return shares
        if kind == "messages":
            moved, rounds, start = whole, 1, self._hop(group)
        else:
            moved, rounds, start = (group.size - 1) / group.size * whole, ROUNDS[kind], self._start(kind, group)
        return tuple(rounds * (moved * share + (share > 0) * start) for share in shares)

    def bandwidth(self, group: Group, kind: Kind = "all_gather") -> float:
        """Bytes/s that every rank of the group can send, when all send at once."""
        slowest = max(self._shares(kind, group))
        return 1 / slowest if slowest else float("inf")

    def _shares(self, kind: Kind, group: Group) -> Links:
        """Seconds for each byte that a rank sends."""
        if (kind, group) not in self._known:
            constants, near, found = self.constants, 1, []
            rates = [(level.gpus // group.stride, level.link.reached * constants.node) for level in self.cluster.levels]
            for members, rate in (*rates, (group.size, self.cluster.network.bandwidth * constants.network)):
                inside = max(near, min(group.size, members))  # ranks of the group that this link joins
                further = inside - near
                if kind == "all_to_all":
                    share = further / max(1, group.size - 1)
                else:
                    share = (further > 0) / (near if kind != "messages" else 1)
                found.append(share / rate)
                near = inside
            self._known[kind, group] = tuple(found)
        return self._known[kind, group]

    def _near(self, group: Group) -> int:
        """Ranks of the group on a node."""
        return max(1, min(group.size, self.cluster.gpus_per_node // group.stride))

    def _hop(self, group: Group) -> float:
        """Seconds until a message arrives at the next rank: a launch, and the slowest hop."""
        near, node, network = self._near(group), self.cluster.levels[-1].link.latency, self.cluster.network.latency
        between, inside = near < group.size, near > 1
        return self.constants.launch + self.constants.hop * max(between * network, inside * node)

    def _start(self, kind: Kind, group: Group) -> float:
        """Seconds until the first element has been around a ring: a launch, and a hop between each two neighbours.

        In an all-to-all every rank sends to all others at once.
        """
        if kind == "all_to_all":
            return self._hop(group)
        between = -(-group.size // self._near(group)) - 1  # hops from node to node
        inside = group.size - 1 - between
        node, network = self.cluster.levels[-1].link.latency, self.cluster.network.latency
        return self.constants.launch + self.constants.hop * (inside * node + between * network)
