"""What the ranks of a layout send each other in a step, by group, and how long that takes. Imports no torch.

What is sent is known transfer by transfer (`plan.traffic`). The time model says how long each takes alone (`network`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.config.layout import Layout
from megalite.plan.pipeline import micro_batches
from megalite.plan.traffic import step_traffic
from megalite.plan.transfers import Traffic, axis_sizes
from megalite.planner.network import ROUNDS, Group, Net
from megalite.planner.predict import Prediction
from megalite.planner.stages import Timer

# By axis of `plan.transfers.axis_sizes`: what moves, and the part of a prediction in which that is counted.
MOVES = {
    "tp": ("activations of every layer", "tensor"),
    "cp": ("keys and values, and their gradients", "context"),
    "fsdp": ("weights and gradients", "data"),
    "dp_replicate": ("gradients", "data"),
    "pp": ("activations and their gradients", "bubble"),
    "stage": ("matrices to their owners, and updates", "optimizer"),
}


@dataclass(frozen=True)
class Flow:
    """The communication over one axis, of a rank on the busiest pipeline rank.

    axis: as in `plan.transfers.axis_sizes`; that of Muon's matrices is stage. what: it moves. bandwidth: bytes/s that
    each rank can send. sent: bytes that the rank sends in a step. seconds: that this takes alone. part: of
    `Prediction.parts`, in which it is counted.
    """

    axis: str
    what: str
    group: Group
    bandwidth: float
    sent: float
    seconds: float
    part: str

    @property
    def ranks(self) -> range:
        """The ranks of the group that rank 0 is in."""
        return range(0, self.group.size * self.group.stride, self.group.stride)


def flows(prediction: Prediction, timer: Timer) -> list[Flow]:
    """One flow for each axis over which something is sent. The few bytes that all ranks sum up are left out.

    Raises InputError for a schedule that cannot run.
    """
    config, busy = prediction.config, prediction.busy
    layout = config.parallel.layout
    rank = layout.rank(pp=busy.index(max(busy)), dp_replicate=0, dp_shard=0, cp=0, tp=0)
    traffic = step_traffic(prediction.plan, rank, micro_batches(config))
    sizes = axis_sizes(config)
    found = []
    for axis, (what, part) in MOVES.items():
        group = Group(sizes[axis], _stride(axis, layout, sizes))
        mine = [each for each in traffic if _axis(each) == axis and group.size > 1]
        if mine:
            pair = Group(2, group.stride) if axis == "pp" else group
            sent = sum(_sent(each) for each in mine)
            seconds = sum(_seconds(each, group, timer.net) for each in mine)
            found.append(Flow(axis, what, group, timer.net.bandwidth(pair), sent, seconds, part))
    return found


def _axis(traffic: Traffic) -> str:
    """Muon's exchanges use the group of another axis where that has the same ranks."""
    return "stage" if traffic.purpose.startswith("optimizer:") else traffic.axis


def _stride(axis: str, layout: Layout, sizes: Mapping[str, int]) -> int:
    """How far apart neighbours in a group are."""
    return {
        "cp": layout.tp,
        "fsdp": layout.tp,
        "dp_replicate": layout.tp * sizes["fsdp"],
        "pp": layout.world_size // layout.pp,
    }.get(axis, 1)


def _sent(traffic: Traffic) -> float:
    """Bytes that the rank sends; what it receives others have sent."""
    if traffic.kind == "receive":
        return 0.0
    if traffic.kind == "send":
        return traffic.total
    rounds = 2 if traffic.kind == "all_reduce" else 1
    return rounds * (traffic.ranks - 1) / traffic.ranks * traffic.total


def _seconds(traffic: Traffic, group: Group, net: Net) -> float:
    if traffic.kind == "receive":
        return 0.0
    for kind in ROUNDS:
        if kind == traffic.kind:
            return traffic.times * net.collective(kind, traffic.bytes, group)
    return traffic.times * net.transfer(traffic.bytes, group.stride)
