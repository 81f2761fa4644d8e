"""The device mesh as a value: which rank this is, and which process groups it belongs to."""

import copyreg
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.layout import Layout

# From PyTorch 2.14 on it is public, and the private one warns.
set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
AXES = ("pp", "dp_replicate", "fsdp", "tp")  # axes of the root mesh, outermost first
EXPERT_AXES = ("ep_replicate", "ep_fsdp", "ep")  # axes of the mesh of experts inside of pp
# Groups of their own even where other axes are the same ranks: a group's collectives wait for one another, and keys,
# values and tokens would wait for the weights that are on their way beside compute.
APART = ("cp", *(f"mesh_{name}" for name in EXPERT_AXES))
PAIRS = ("pp_even", "pp_odd", "pp_ends")  # divisions of the ranks into neighbours in pipelines
# Most multiprocessors that a group's messages may take from matrix products: NCCL's kernels wait on them for the other
# rank. Unbounded they take some 16 to 32 inside of a node, and 2 for each peer and adapter between nodes.
MAX_CTAS = {"mesh_pp": 8, **dict.fromkeys(PAIRS, 4)}  # a rank is in two pairs


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
    # The same ranks with the axes pp, ep_replicate, ep_fsdp and ep: ranks along ep share out the experts of a layer,
    # and ranks along the two axes before it have the same experts. None: every rank has all.
    experts: DeviceMesh | None = None
    pairs: tuple[dist.ProcessGroup, ...] = ()  # this rank with each of its neighbours in the pipeline; of 2, it is "pp"

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
        with_stage: make `stage`; it is one more group where no other has these ranks.
        """
        replicas, shards = layout.dp_replicate, layout.dp_shard * layout.cp
        data = (replicas, shards) if sharded else (replicas * shards, 1)
        ranks = torch.arange(layout.world_size)
        grid = ranks.view(layout.pp, *data, layout.tp)
        lines = {f"mesh_{name}": _lines(grid, axis) for axis, name in enumerate(AXES)}
        lines |= {"world": ranks[None], "stage": grid.flatten(1)} if with_stage else {"world": ranks[None]}
        if layout.pp > 2:
            lines |= _pairs(_lines(grid, 0))
        if layout.cp > 1:
            lines["cp"] = _lines(ranks.view(-1, layout.cp, layout.tp), 1)
        same = shards * layout.tp // layout.ep
        expert_grid = ranks.view(layout.pp, *((replicas, same) if sharded else (replicas * same, 1)), layout.ep)
        if layout.ep > 1:
            lines |= {f"mesh_{name}": _lines(expert_grid, axis) for axis, name in enumerate(EXPERT_AXES, start=1)}
        found = _groups(lines)
        rank, mesh = dist.get_rank(), None
        if rank < layout.world_size:
            root = DeviceMesh.from_group(
                [found[f"mesh_{name}"] for name in AXES], device.type, grid, mesh_dim_names=AXES
            )
            experts = None
            if layout.ep > 1:
                names = ("pp", *EXPERT_AXES)
                groups = [found[f"mesh_{name}"] for name in names]
                experts = DeviceMesh.from_group(groups, device.type, expert_grid, mesh_dim_names=names)
            pairs = tuple(group for name in PAIRS if (group := found.get(name)) is not None)
            others = found.get("cp"), found.get("stage"), experts, pairs
            mesh = Mesh(layout, device, root, found["world"], rank, *others)
        if mesh is not None and timeout is not None:
            for group in mesh.groups:
                set_timeout(timeout, group)
        if device.type == "cuda":
            connect(dict.fromkeys([dist.group.WORLD, *(mesh.groups if mesh is not None else ())]), device)
        return mesh

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every group in which this rank communicates, in an order that is the same on all ranks."""
        axes = [self.group(axis) for axis in AXES]
        others = [group for group in (self.cp, self.stage) if group is not None]
        if self.experts is not None:
            others += [self.experts.get_group(axis) for axis in EXPERT_AXES]
        return list(dict.fromkeys([self.world, *axes, *self.pairs, *others]))

    @property
    def axes(self) -> dict[str, str]:
        """The axis of each of this rank's groups with several ranks, by the group's name: tp, cp, pp, or dp (replicas
        too).

        A group of all processes is PyTorch's own, whose description tells no axis.
        """
        found = {self.group(axis): axis if axis in ("pp", "tp") else "dp" for axis in AXES}
        found |= dict.fromkeys(self.pairs, "pp")
        found |= {} if self.cp is None else {self.cp: "cp"}
        if self.experts is not None:
            found |= {self.experts.get_group("ep"): "ep"}
            found |= {self.experts.get_group(axis): "dp" for axis in ("ep_replicate", "ep_fsdp")}
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
        replicas = self.experts["ep_replicate"].size() > 1
        return self.experts["ep_replicate", "ep_fsdp"] if replicas else self.experts["ep_fsdp"]

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.root.get_group(axis)

    def toward(self, position: int) -> dist.ProcessGroup:
        """The group of messages to another pipeline rank: a pair if they are neighbours, so that none waits for others.

        NCCL runs the exchanges of a group one after the other.
        """
        peer = self.along("pp", position)
        return next((pair for pair in self.pairs if peer in dist.get_process_group_ranks(pair)), self.group("pp"))

    def along(self, axis: str, position: int) -> int:
        """The global rank at `position` along `axis` that has this rank's other coordinates."""
        return self.layout.rank(**{**self.coordinates, axis: position})


def _lines(grid: Tensor, axis: int) -> Tensor:
    """The ranks of a grid as lines along one of its axes."""
    return grid.movedim(axis, -1).flatten(0, -2)


def _pairs(pipelines: Tensor) -> dict[str, Tensor]:
    """Neighbours in pipelines, first and last rank included: by name of a division that has each rank at most once."""
    p = pipelines.shape[1]
    pairs = {"pp_even": pipelines[:, : p - p % 2], "pp_odd": pipelines.roll(-1, 1)[:, : p - p % 2]}
    if p % 2:
        pairs["pp_ends"] = pipelines[:, [0, -1]]
    return {name: rows.reshape(-1, 2) for name, rows in pairs.items()}


def _groups(lines: Mapping[str, Tensor]) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank, by name of a division of the ranks into `lines`.

    Divisions into equal lines share a group, but for APART of several ranks: each takes memory in NCCL, and in gloo a
    connection to every other rank. Collective over all processes of the job; a rank that is in no line gets None.
    """
    made: dict[tuple[str, tuple[tuple[int, ...], ...]], Any] = {
        ("", (tuple(range(dist.get_world_size())),)): dist.group.WORLD
    }
    found = {}
    for name, rows in lines.items():
        key = name if name in APART and rows.shape[1] > 1 else "", tuple(map(tuple, rows.tolist()))
        if key not in made:
            made[key] = dist.new_subgroups_by_enumeration(rows.tolist(), group_desc=name, **_bounds(name))[0]
        found[name] = made[key]
    return found


def _bounds(name: str) -> dict[str, Any]:
    """Arguments of a new group that bound its messages by MAX_CTAS, if NCCL carries them."""
    if name not in MAX_CTAS or "cuda:nccl" not in dist.get_backend_config():
        return {}
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CTAS[name]
    return {"pg_options": options, "timeout": options._timeout}  # PyTorch warns of options with another timeout


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


def _without_hash(mesh: DeviceMesh) -> tuple[Any, ...]:
    """A `DeviceMesh` as it is pickled, but for its hash, which it keeps.

    It is one of texts, which every process hashes otherwise. PyTorch's cache finds a compiled graph by what pickles of
    its inputs have, from PyTorch 2.13 on the meshes of DTensors among them.
    """
    pickled: Any = mesh.__reduce_ex__(4)
    make, arguments, state, *_ = pickled
    return make, arguments, {**state, "_hash": None}


copyreg.pickle(DeviceMesh, _without_hash)
