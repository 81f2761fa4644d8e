"""The device mesh as a value: which rank this is, and which process groups it belongs to."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.layout import Layout

# From PyTorch 2.14 on it is public, and the private one warns.
set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the layout.

    `root` has the axes pp, dp_replicate, fsdp and tp, where fsdp is `dp_shard` and `cp` together: the ranks over which
    parameters are sharded. Where nothing is sharded, they all count as replicas. `world` holds every rank of this mesh,
    which may be fewer than the processes of the job: a reference on one rank can live beside the layout it is compared
    with.
    """

    layout: Layout
    device: torch.device
    root: DeviceMesh
    world: dist.ProcessGroup
    rank: int
    cp: dist.ProcessGroup | None  # the ranks that share this rank's sequences; None: it has them whole
    stage: dist.ProcessGroup | None = None  # all ranks with this rank's position along pp; None: nobody asked for it
    # The same ranks with the axes pp, dp_replicate, ep_fsdp and ep: ranks of ep share out the experts of a layer, those
    # of ep_fsdp have the same ones. None: every rank has all.
    experts: DeviceMesh | None = None

    @staticmethod
    def build(
        layout: Layout,
        device: torch.device,
        sharded: bool = True,
        timeout: timedelta | None = None,
        with_stage: bool = False,
    ) -> "Mesh | None":
        """The mesh over the first `layout.world_size` processes; None on the others.

        Collective over all processes of the job. On CUDA, all connections between ranks exist when this returns.
        timeout: of one collective of the mesh's groups; None: PyTorch's own.
        with_stage: make `stage`. Where no other group has these ranks it is one more, for which NCCL takes memory.
        """
        replicas, shards = layout.dp_replicate, layout.dp_shard * layout.cp
        data = (replicas, shards) if sharded else (replicas * shards, 1)
        shape = (layout.pp, *data, layout.tp)
        ranks = torch.arange(layout.world_size)
        root = DeviceMesh(device.type, ranks.view(shape), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        # NCCL takes memory for every group. On CPUs that costs nothing, and a dry run tells axes by their groups.
        is_default = device.type == "cuda" and layout.world_size == dist.get_world_size()
        world = dist.group.WORLD if is_default else dist.new_group(ranks.tolist(), group_desc="world")
        assert world is not None
        lines = ranks.view(-1, layout.cp, layout.tp).transpose(1, 2).reshape(-1, layout.cp).tolist()
        cp = dist.new_subgroups_by_enumeration(lines, group_desc="cp")[0] if layout.cp > 1 else None
        stage = _stage(root, world) if with_stage else None
        experts = None
        if layout.ep > 1:
            same = layout.dp_shard * layout.cp * layout.tp // layout.ep
            data = (layout.dp_replicate, same) if sharded else (layout.dp_replicate * same, 1)
            names = ("pp", "dp_replicate", "ep_fsdp", "ep")
            experts = DeviceMesh(device.type, ranks.view(layout.pp, *data, layout.ep), mesh_dim_names=names)
        rank = dist.get_rank()
        mesh = Mesh(layout, device, root, world, rank, cp, stage, experts) if rank < layout.world_size else None
        if mesh is not None and timeout is not None:
            for group in mesh.groups:
                set_timeout(timeout, group)
        if device.type == "cuda":
            connect(dict.fromkeys([dist.group.WORLD, *(mesh.groups if mesh is not None else ())]), device)
        return mesh

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every group in which this rank communicates, in an order that is the same on all ranks."""
        axes = [self.group(axis) for axis in self.root.mesh_dim_names or ()]
        others = [group for group in (self.cp, self.stage) if group is not None]
        if self.experts is not None:
            others += [self.experts.get_group(axis) for axis in ("dp_replicate", "ep_fsdp", "ep")]
        return list(dict.fromkeys([self.world, *axes, *others]))

    @property
    def axes(self) -> dict[str, str]:
        """The axis of each of this rank's groups with several ranks, by the group's name: tp, cp, pp, or dp (replicas
        too).

        A group of all processes is PyTorch's own, whose description tells no axis.
        """
        found = {self.group(axis): axis if axis in ("pp", "tp") else "dp" for axis in self.root.mesh_dim_names or ()}
        found |= {} if self.cp is None else {self.cp: "cp"}
        if self.experts is not None:
            found |= {self.experts.get_group("ep"): "ep"}
            found |= {self.experts.get_group(axis): "dp" for axis in ("dp_replicate", "ep_fsdp")}
        return {group.group_name: axis for group, axis in found.items() if group.size() > 1}

    @property
    def coordinates(self) -> dict[str, int]:
        return self.layout.coordinates(self.rank)

    @property
    def dp_rank(self) -> int:
        """Number of the slice of the global batch that this rank reads."""
        return self.layout.dp_rank(self.rank)

    @property
    def tp(self) -> DeviceMesh:
        return self.root["tp"]

    @property
    def data(self) -> DeviceMesh:
        """The mesh given to FSDP2: one axis, or (dp_replicate, fsdp) for HSDP."""
        return self.root["dp_replicate", "fsdp"] if self.root["dp_replicate"].size() > 1 else self.root["fsdp"]

    @property
    def ep(self) -> DeviceMesh:
        """The mesh of the ranks that share out the experts of a layer; that of tp where every rank has all."""
        return self.tp if self.experts is None else self.experts["ep"]

    @property
    def expert_data(self) -> DeviceMesh:
        """The mesh given to FSDP2 for experts; as `data`."""
        if self.experts is None:
            return self.data
        replicas = self.experts["dp_replicate"].size() > 1
        return self.experts["dp_replicate", "ep_fsdp"] if replicas else self.experts["ep_fsdp"]

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.root.get_group(axis)

    def along(self, axis: str, position: int) -> int:
        """The global rank at `position` along `axis` that has this rank's other coordinates."""
        return self.layout.rank(**{**self.coordinates, axis: position})


def _stage(root: DeviceMesh, world: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The ranks with this one's position along pp: a group that is there, or a new one; None for other processes.

    Collective over all processes of the job.
    """
    pp, *inner = root.mesh.shape
    if pp == 1:
        return world
    used = [axis for axis, size in enumerate(inner, 1) if size > 1]
    if len(used) > 1:
        return dist.new_subgroups_by_enumeration(root.mesh.flatten(1).tolist(), group_desc="stage")[0]
    return None if root.get_coordinate() is None else root.get_group(used[0] if used else 1)


def connect(groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """Make the ranks of every group connect now: in a collective, and with their neighbours in a ring.

    NCCL makes a communicator at its first use, and a connection between two ranks at their first exchange. Ranks that
    come first wait for the others in the key-value store, whose timeout is not that of collectives. In a pipeline they
    would wait until the first stage has compiled and run. All ranks must give their groups in the same order.
    """
    for group in groups:
        if group is None or group.size() == 1:
            continue
        token = torch.ones(1, device=device)
        dist.all_reduce(token, group=group)
        following, before = ((group.rank() + step) % group.size() for step in (1, -1))
        exchange = [dist.P2POp(dist.isend, token, group=group, group_peer=peer) for peer in (following, before)]
        exchange += [
            dist.P2POp(dist.irecv, torch.empty_like(token), group=group, group_peer=peer)
            for peer in (before, following)
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
