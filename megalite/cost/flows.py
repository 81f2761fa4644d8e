"""Transfers among the ranks of a layout in a step, by group, and how long they take. Imports no torch.

The transfers are known one by one (`plan.traffic`). The time model says how long each takes alone (`network`).
"""

from dataclasses import dataclass

from megalite.cost.link_clocks import groups, kind_of
from megalite.cost.network import ROUNDS, Group, Kind, Net
from megalite.cost.predict import Prediction
from megalite.cost.stages import Timer
from megalite.plan.parts.transfers import Traffic
from megalite.plan.pipeline import micro_batches
from megalite.plan.traffic.step import step_traffic

# By axis of `plan.parts.transfers.axis_sizes`: what moves, and the part of a prediction in which that is counted.
MOVES = {
    "tp": ("activations of every layer", "tensor"),
    "cp": ("keys and values, and their gradients", "context"),
    "ep": ("tokens, what experts make of them, and gradients", "experts"),
    "fsdp": ("weights and gradients", "data"),
    "dp_replicate": ("gradients", "data"),
    "ep_fsdp": ("weights and gradients of experts", "data"),
    "ep_replicate": ("gradients of experts", "data"),
    "pp": ("activations and their gradients", "bubble"),
    "stage": ("matrices to their owners, and updates", "optimizer"),
}


@dataclass(frozen=True)
class Flow:
    """The communication over one axis, of a rank on the busiest pipeline rank.

    axis: as in `parts.transfers.axis_sizes`; that of Muon's matrices is stage. what: it moves. bandwidth: bytes/s that
    each rank can send; of several kinds of transfers, in the slowest. sent: bytes that the rank sends in a step.
    seconds: that this takes alone. part: of `Prediction.parts`, in which it is counted.
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
    config, net = prediction.config, timer.net
    on, found = groups(config), []
    for axis, mine in by_axis(prediction, prediction.busy.index(max(prediction.busy))).items():
        (what, part), group = MOVES[axis], on[axis]
        sent = sum(_sent(each) for _, each in mine)
        seconds = sum(_seconds(kind, each, group, net) for kind, each in mine)
        rate = min(net.bandwidth(group, kind) for kind, _ in mine)
        found.append(Flow(axis, what, group, rate, sent, seconds, part))
    return found


def by_axis(prediction: Prediction, pp: int) -> dict[str, list[tuple[Kind, Traffic]]]:
    """Transfers of a pipeline rank's first rank in a step, over each axis of MOVES over which it sends anything.

    Raises InputError for a schedule that cannot run.
    """
    config = prediction.config
    rank = config.parallel.layout.rank(pp=pp, dp_replicate=0, dp_shard=0, cp=0, tp=0)
    found: dict[str, list[tuple[Kind, Traffic]]] = {axis: [] for axis in MOVES}
    for each in step_traffic(prediction.plan, rank, micro_batches(config)):
        axis, kind = _axis(each), kind_of(each.kind)
        if kind and axis in found and each.ranks > 1:
            found[axis].append((kind, each))
    return {axis: sent for axis, sent in found.items() if sent}


def _axis(traffic: Traffic) -> str:
    """Muon's exchanges use the group of another axis where that has the same ranks."""
    return "stage" if traffic.purpose.startswith("optimizer:") else traffic.axis


def _sent(traffic: Traffic) -> float:
    """Bytes that the rank sends."""
    if traffic.kind == "send":
        return traffic.total
    return ROUNDS.get(traffic.kind, 1) * (traffic.ranks - 1) / traffic.ranks * traffic.total


def _seconds(kind: Kind, traffic: Traffic, group: Group, net: Net) -> float:
    if kind == "messages":
        return traffic.times * net.transfer(traffic.bytes, group)
    return traffic.times * net.collective(kind, traffic.bytes, group)
