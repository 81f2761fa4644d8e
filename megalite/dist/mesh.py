"""The device mesh as a value: who this rank is and which process groups it belongs to."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the layout.

    `root` has the axes pp, dp_replicate, fsdp and tp, where fsdp is `dp_shard` and `cp` together: the
    ranks over which parameters are sharded. Where nothing is sharded, they all count as replicas. `world` holds every rank of this mesh, which may be fewer
    than the processes of the job: a reference on one rank can live beside the layout it is compared with.
    """

    layout: Layout
    device: torch.device
    root: DeviceMesh
    world: dist.ProcessGroup
    rank: int
    cp: dist.ProcessGroup | None  # the ranks that share this rank's sequences; None: it has them whole

    @staticmethod
    def build(layout: Layout, device: torch.device, sharded: bool = True) -> "Mesh | None":
        """The mesh over the first `layout.world_size` processes; None on the others.

        Collective over all processes of the job.
        """
        replicas, shards = layout.dp_replicate, layout.dp_shard * layout.cp
        data = (replicas, shards) if sharded else (replicas * shards, 1)
        shape = (layout.pp, *data, layout.tp)
        ranks = torch.arange(layout.world_size)
        root = DeviceMesh(device.type, ranks.view(shape), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        world = dist.new_group(ranks.tolist())
        lines = ranks.view(-1, layout.cp, layout.tp).transpose(1, 2).reshape(-1, layout.cp).tolist()
        cp = dist.new_subgroups_by_enumeration(lines)[0] if layout.cp > 1 else None
        rank = dist.get_rank()
        return Mesh(layout, device, root, world, rank, cp) if rank < layout.world_size else None

    @property
    def coordinates(self) -> dict[str, int]:
        return self.layout.coordinates(self.rank)

    @property
    def dp_rank(self) -> int:
        """Which slice of the global batch this rank reads."""
        return self.layout.dp_rank(self.rank)

    @property
    def tp(self) -> DeviceMesh:
        return self.root["tp"]

    @property
    def data(self) -> DeviceMesh:
        """The mesh given to FSDP2: one axis, or (dp_replicate, fsdp) for HSDP."""
        return self.root["dp_replicate", "fsdp"] if self.root["dp_replicate"].size() > 1 else self.root["fsdp"]

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.root.get_group(axis)

    def along(self, axis: str, position: int) -> int:
        """Global rank at `position` of `axis`, at this rank's other coordinates."""
        return self.layout.rank(**{**self.coordinates, axis: position})
