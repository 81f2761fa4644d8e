"""Load of optimizer states in files on the drives of a node: bytes, seconds of a step, and wear. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.schema import Config
from megalite.cost.cluster import ASSUMED_DRIVE, Cluster, Drive
from megalite.plan.memory.held import FILES
from megalite.plan.memory.peak import Memory
from megalite_launch.base.texts import memory_text, rounded, scaled, seconds_text

USUAL_GPUS = 8  # GPUs of a node where no cluster is named


@dataclass(frozen=True)
class StateFiles:
    """Optimizer states in files of one node.

    rank: bytes in the files of the fullest rank. ranks: on a node. moved: bytes of states on a node, which a step reads
    and writes once.
    """

    drive: Drive
    rank: int
    ranks: int
    moved: int

    @property
    def seconds(self) -> float:
        """Seconds in which the drives read and write the states of a step."""
        return self.moved / self.drive.read + self.moved / self.drive.write

    @property
    def steps(self) -> float:
        """Steps after which as much is written as the drives are rated for."""
        return self.drive.endurance / self.moved


def state_files(config: Config, memories: Sequence[Memory], cluster: Cluster | None) -> StateFiles | None:
    """The files of a node with the fullest pipeline ranks; None if states are not in files, or there are none.

    memories: predicted, of every pipeline rank. cluster: None for an assumed node.
    """
    rank, checkpoint = 0, 0
    for memory in memories:
        found = memory.of(FILES)
        rank, checkpoint = max((rank, checkpoint), (sum(found.values()), found.get("checkpoint", 0)))
    if not rank:
        return None
    ranks = min(config.parallel.layout.world_size, USUAL_GPUS if cluster is None else cluster.gpus_per_node)
    drive = ASSUMED_DRIVE if cluster is None else cluster.drive
    return StateFiles(drive, rank, ranks, (rank - checkpoint) * ranks)


def files_text(config: Config, memories: Sequence[Memory], cluster: Cluster | None) -> str:
    """Text on states in files; "" if there are none."""
    found = state_files(config, memories, cluster)
    if found is None:
        return ""
    drive, steps = found.drive, config.train.steps
    copy = ", with the copy that checkpoint.async makes" if config.checkpoint.async_ else ""
    rates = f"{scaled(drive.read, 'B/s')} and {scaled(drive.write, 'B/s')}"
    whose = "one assumed drive; `drive` in a cluster's file names others" if drive.assumed else "the node's drives"
    life = f"Rated for {scaled(drive.endurance, 'B')} written, they last {rounded(found.steps)} steps"
    return (
        f"{memory_text(found.rank)} in {config.optim.placement} for a rank, {memory_text(found.rank * found.ranks)} on "
        f"a node of {found.ranks}{copy}. A step reads {memory_text(found.moved)} on a node and writes as much, which "
        f"takes {seconds_text(found.seconds)} at {rates} ({whose}). {life}: the {steps:,} of this run write "
        f"{scaled(found.moved * steps, 'B')}, {rounded(100 * steps / found.steps)} % of that."
    )
