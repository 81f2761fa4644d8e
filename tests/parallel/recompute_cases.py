"""What runs on the ranks in the tests of recompute and offload."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from toy_jobs import make

from megalite.commands.verify import Difference, compare, random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Context, Parallel, Pipeline
from megalite.config.schema import Batch, Config, Train
from megalite.distributed import collectives
from megalite.distributed.mesh import Mesh
from megalite.dry_run.live_bytes import LiveBytes
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.parallel import norm
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.offload import AsIs, Keeping
from megalite.parallel.recompute import Counted, recompute
from megalite.parallel.sequence import Method
from megalite.plan.activations import Activations
from megalite.plan.pipeline import tables_of
from megalite.plan.recompute_modes import MODES, Costs, Mode, ModeCost, held_by_rank, kept_by_rank
from megalite.plan.resolved import estimated_costs
from megalite.plan.split import split_of
from megalite.train import build as train_build
from megalite.train import recompute_costs
from megalite.train.build import Job
from megalite.train.recompute_costs import measured_costs, plan_for
from megalite.train.step import train_step

CPU = torch.device("cpu")
MODEL = Model(
    layers=4, width=16, heads=4, kv_heads=2, head_width=6, ffn=20, vocab_size=32, sequence_length=8, qk_norm=True
)


def config_of(
    layout: Layout, schedule: str = "1f1b", model: Model = MODEL, context: Method = "ring", **train: Any
) -> Config:
    """Two sequences in each of three micro-batches."""
    degrees = layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp
    parallel = Parallel(*degrees, pipeline=Pipeline(schedule), context=Context(context))
    return Config(
        model=model,
        parallel=parallel,
        batch=Batch(2, 6 * layout.dp),
        train=Train(steps=3, precision="fp64", **train),
    )


def one_layer(mesh: Mesh, model: Model, mode: Mode, keeping: Keeping) -> tuple[Decoder, torch.Tensor]:
    """A stage of one layer, and an input of two sequences for it."""
    stage = Decoder(model, mesh.tp, range(1), first=False, last=False).to(torch.float64).to_empty(device=CPU)
    initialize(stage, model, 0)
    recompute(stage.layers["0"], mode, keeping)
    x = torch.ones(model.sequence_length // mesh.layout.tp, 2, model.width, dtype=torch.float64, requires_grad=True)
    return stage, x


def saved_bytes(tp: int, model: Model) -> dict[Mode, int] | None:
    """What one layer saves in every mode."""
    mesh = Mesh.build(Layout(tp=tp), CPU)
    if mesh is None:
        return None
    found: dict[Mode, int] = {}
    for mode in MODES:
        counted = Counted()
        stage, x = one_layer(mesh, model, mode, counted)
        stage(x, None)
        found[mode] = counted.bytes
    return found


def collectives_of(tp: int, mode: Mode, model: Model = MODEL) -> tuple[Counter[str], Counter[str]] | None:
    """What one layer communicates in forward and in backward."""
    mesh = Mesh.build(Layout(tp=tp), CPU)
    if mesh is None:
        return None
    stage, x = one_layer(mesh, model, mode, AsIs)
    counts = []
    with counting("all_gather_single", "reduce_scatter_single") as count, counting("start_all_reduce", of=norm) as sums:
        y = stage(x, None)
        counts.append(count + sums)
        y.sum().backward()
        counts.append(count + sums - counts[0])
    return counts[0], counts[1]


@contextmanager
def counting(*names: str, of: ModuleType = collectives) -> Iterator[Counter[str]]:
    """Counts calls of functions of the module `of` by their name."""
    count: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(of, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return original(*args, **kwargs)

        return call

    with patch.multiple(of, **{name: counted(name) for name in names}):
        yield count


def live_bytes(config: Config) -> dict[str, int]:
    """Bytes by kind at the peak of a step, what has been copied to the host by itself."""
    job = make(config)
    live = LiveBytes()
    original = HostMemory.empty_like

    def empty_like(*args: Any) -> torch.Tensor:
        host = original(*args)
        live.add([host], "host")
        return host

    train_step(job, random_batch(job, 0), 0)
    with patch.object(HostMemory, "empty_like", empty_like), live:
        train_step(job, random_batch(job, 1), 1)
    return live.peak()


@dataclass(frozen=True)
class Budgeted:
    """How a rank of a job was built within a budget."""

    costs: dict[Mode, ModeCost]  # measured once more
    modes: list[Mode]  # of its layers
    limit: int  # bytes of its layers
    saved: list[int]  # bytes of each layer, in one forward pass
    held: list[int]  # micro-batches that each layer holds


def within_budget(config: Config, share: float) -> tuple[Config, Costs]:
    """A budget `share` of the way from what all layers save when run again to what they save when not. Collective."""
    mesh = Mesh.build(config.parallel.layout, CPU)
    told = [None if mesh is None else measured_costs(config, mesh)[0]]
    dist.broadcast_object_list(told, src=0)
    costs = told[0]
    tables = tables_of(config)
    kept = kept_by_rank(tables, Activations(config).outside(tables[0].stages))
    ranks = list(zip(held_by_rank(tables, split_of(config)), kept, strict=True))
    most, least = (max(costs[mode].bytes * sum(held) + kept for held, kept in ranks) for mode in ("none", "full"))
    budget = (least + share * (most - least)) / (1 << 30)
    return replace(config, train=replace(config.train, recompute="budget", recompute_budget=budget)), costs


def measured_and_planned(config: Config) -> list[tuple[int, int]] | None:
    """Bytes of every layer in every mode, as measured and as planned."""
    mesh = Mesh.build(config.parallel.layout, CPU)
    if mesh is None:
        return None
    pairs = zip(measured_costs(config, mesh), estimated_costs(config), strict=True)
    return [(found[mode].bytes, planned[mode].bytes) for found, planned in pairs for mode in MODES]


def compare_within_budget(config: Config, share: float) -> list[Difference]:
    return compare(within_budget(config, share)[0], 2, 1e-10)


def built(config: Config) -> tuple[Job, list[Mode], list[Counted]] | None:
    """A job, the modes of its layers, and the count of what each saves in its latest forward pass."""
    mesh = Mesh.build(config.parallel.layout, CPU)
    if mesh is None:
        return None
    modes: list[Mode] = []
    counts: list[Counted] = []

    def counting_recompute(layer: nn.Module, mode: Mode, _: Keeping) -> None:
        modes.append(mode)
        counts.append(Counted())
        recompute(layer, mode, counts[-1])

    with patch.object(train_build, "recompute", counting_recompute):
        return train_build.build(plan_for(config, mesh), mesh), modes, counts


def modes_of(config: Config) -> list[Mode]:
    """What this rank's layers recompute, one stage after another."""
    job = built(config)
    return [] if job is None else job[1]


def budgeted(config: Config, share: float) -> Budgeted | None:
    """Build and run a job within a budget."""
    config, costs = within_budget(config, share)
    # Layers this small take times that are mostly noise; on a busy machine, full has come out as the fastest.
    costs = {mode: replace(costs[mode], seconds=seconds) for mode, seconds in zip(MODES, (1.0, 1.1, 1.4), strict=True)}
    with patch.object(recompute_costs, "measured_costs", lambda *_: [costs] * config.model.layers):
        found = built(config)
    if found is None:
        return None
    job, modes, counts = found
    train_step(job, random_batch(job, 0), 0)
    tables, pp = tables_of(config), job.mesh.coordinates["pp"]
    held = held_by_rank(tables, split_of(config))[pp]
    kept = kept_by_rank(tables, Activations(config).outside(tables[0].stages))[pp]
    limit = round((config.train.recompute_budget or 0) * (1 << 30)) - kept
    return Budgeted(measured_costs(config, job.mesh)[0], modes, limit, [count.bytes for count in counts], held)
