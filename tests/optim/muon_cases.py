"""What runs on the ranks in the tests of Muon over shards."""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from megalite.commands.verify import RankPart, random_batch
from megalite.config.layout import Layout
from megalite.config.schema import Config, Place
from megalite.distributed.mesh import Mesh
from megalite.dry_run.live_bytes import LiveBytes
from megalite.optim.exchange import Arriving, Views
from megalite.optim.muon import Muon, held_by
from megalite.optim.states import DeviceStates, HostStates, local
from megalite.parallel.parameter import parameter, parameters
from megalite.plan.muon import Box
from megalite.plan.parts import part
from megalite.plan.parts.roles import UP_PROJECTION, RoleKind
from megalite.plan.resolved import resolve
from megalite.plan.state_streams import padded
from megalite.train.build import build
from megalite.train.step import train_step
from megalite_kernels.backend import Backend

CPU = torch.device("cpu")
STEPS = 3
BAD = 1  # the step that is skipped
CLIP = 0.5


class Weight(nn.Module):
    """A matrix, or a stack of matrices, of which tp splits dimension `split`."""

    def __init__(self, shape: tuple[int, ...], split: int, mesh: Mesh) -> None:
        super().__init__()
        self.weight = parameter(part.Weight(shape, UP_PROJECTION), mesh.tp, Shard(split))


@dataclass(frozen=True)
class Held:
    """What one rank has in the end."""

    weights: list[RankPart]
    momenta: list[RankPart]
    misplaced: list[int]  # parameters whose momentum is not placed as they are
    boxes: list[tuple[Box, ...]]  # of all ranks, as this one sees them
    sent: int  # bytes to other ranks, and from them, in the last step
    received: int
    exchanges: int
    temporaries: int  # bytes at the peak of the last step


def values(shape: Sequence[int], seed: int) -> Tensor:
    """A whole matrix, the same wherever it is made."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(shapes: Sequence[tuple[int, ...]], pp: int) -> list[Tensor]:
    return [values(shape, 1000 * pp + number) for number, shape in enumerate(shapes)]


def gradients_of(shapes: Sequence[tuple[int, ...]], pp: int, step: int) -> list[Tensor]:
    return [values(shape, 1000 * pp + 100 * (step + 1) + number) for number, shape in enumerate(shapes)]


@contextmanager
def letting_go() -> Iterator[None]:
    """Have every exchange end only when gloo's thread, too, has let go of its buffers: it may do so late."""
    wait = Arriving.wait

    def waited(self: Arriving) -> Views:
        held = self.sent if self.work is not None else None
        sent = None if held is None else weakref.ref(held.untyped_storage())
        del held
        views = wait(self)
        deadline = time.monotonic() + 5
        while sent is not None and sent() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        return views

    with patch.object(Arriving, "wait", waited):
        yield


def stepped(
    layout: Layout,
    sharded: bool,
    shapes: Sequence[tuple[int, ...]],
    splits: Sequence[int],
    bucket_bytes: int,
    place: Place = "device",
    backend: Backend = "auto",
) -> Held | None:
    """Three steps, of which one is skipped, on matrices and gradients that every rank knows whole."""
    mesh = Mesh.build(layout, CPU, sharded, with_stage=True)
    if mesh is None:
        return None
    pp = mesh.coordinates["pp"]
    modules = [Weight(shape, split, mesh) for shape, split in zip(shapes, splits, strict=True)]
    for module in modules:
        if layout.dp * layout.cp > 1:
            fully_shard(module, mesh=mesh.data)
        module.double().to_empty(device=CPU)
    params = [module.weight for module in modules]
    for param, whole in zip(params, weights_of(shapes, pp), strict=True):
        fill(param, whole)
    slot = padded(max(local(param).nbytes for param in params))
    states = DeviceStates() if place == "device" else HostStates(slot)
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "states": states, "backend": backend}
    optimizer = Muon(params, mesh.stage, lr=0.02, weight_decay=0.3, **options)
    peaks = []
    for step in range(STEPS):
        for param, whole in zip(params, gradients_of(shapes, pp, step), strict=True):
            param.grad = torch.zeros_like(param)
            fill(param.grad, whole if step != BAD else torch.full_like(whole, torch.nan))
        optimizer.found_inf = torch.tensor([float(step == BAD)])
        optimizer.clip = torch.tensor(CLIP)
        live = LiveBytes()
        for param in params:
            live.add([param, param.grad, *optimizer.state[param].values()], "kept")
        with counted_traffic() as traffic, live, letting_go():
            optimizer.step()
        if step != BAD:
            peaks.append(sum(size for kind, size in live.peak().items() if kind != "kept"))
    momenta = [optimizer.states_of(param)["momentum_buffer"] for param in params]
    pairs = enumerate(zip(params, momenta, strict=True))
    return Held(
        [RankPart.of(param) for param in params],
        [RankPart.of(average) for average in momenta],
        [number for number, (param, average) in pairs if param.placements != average.placements],
        [held_by(param, mesh.stage.rank(), mesh.stage.size()) for param in params],
        *traffic,
        peaks[-1],  # the first step makes the momentum as well
    )


def refused(layout: Layout) -> str:
    """What a step says that is to make do with the ranks of tp."""
    mesh = Mesh.build(layout, CPU)
    assert mesh is not None
    module = Weight((8, 4), 0, mesh)
    fully_shard(module, mesh=mesh.data)
    module.to_empty(device=CPU)
    module.weight.grad = torch.zeros_like(module.weight)
    try:
        Muon([module.weight], mesh.group("tp")).step()
    except ValueError as error:
        return str(error)
    return ""


def fill(tensor: Tensor, whole: Tensor) -> None:
    part = RankPart.of(tensor)
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        tensor.to_local().copy_(whole[part.box])


@contextmanager
def counted_traffic() -> Iterator[list[int]]:
    """Bytes sent to and received from other ranks, and the number of exchanges."""
    counted = [0, 0, 0]
    original = dist.all_to_all_single

    def count(out: Tensor, x: Tensor, of: list[int], to: list[int], group: Any, async_op: bool) -> Any:
        rank = group.rank()
        assert (len(out), len(x)) == (sum(of), sum(to))
        counted[0] += (sum(to) - to[rank]) * x.itemsize
        counted[1] += (sum(of) - of[rank]) * x.itemsize
        counted[2] += 1
        return original(out, x, of, to, group, async_op)

    with patch.object(dist, "all_to_all_single", count):
        yield counted


@dataclass(frozen=True)
class Trained:
    """What training leaves on one rank."""

    losses: list[float]
    weights: list[tuple[str, RankPart]]
    boxes: list[tuple[Box, ...]]  # of the matrices inside of layers


def trained(config: Config) -> Trained | None:
    """Train for three steps, on random tokens."""
    mesh = Mesh.build(config.parallel.layout, CPU, config.parallel.data.sharded, with_stage=True)
    if mesh is None:
        return None
    job = build(resolve(config), mesh)
    losses = [train_step(job, random_batch(job, step), step).read().loss for step in range(STEPS)]
    found = chain(*map(parameters, job.stages.values()))
    params = [each.value for each in found if each.role.kind is RoleKind.MATRIX]
    assert all([*job.optimizer.states_of(param)] == ["momentum_buffer"] for param in params)
    boxes = [held_by(param, mesh.stage.rank(), mesh.stage.size()) for param in params]
    return Trained(losses, [(name, RankPart.of(param)) for name, param in job.named_parameters()], boxes)


def alone(config: Config) -> Config:
    """The same, on one rank without micro-batches."""
    parallel = type(config.parallel)(dp_shard=1)
    return replace(config, parallel=parallel, batch=replace(config.batch, micro=config.batch.global_))
