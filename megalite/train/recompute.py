"""What every layer of a rank recomputes: as configured, or the least that fits a budget at measured costs."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist

from megalite.config.schema import Config
from megalite.dist.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.model.positions import Places
from megalite.parallel.context import attention
from megalite.parallel.fsdp import compute_dtype
from megalite.parallel.recompute import measure
from megalite.plan.recompute import GIB, MODES, Cost, Mode, choose_for_all, every_nth, held_by_rank, kept_bytes
from megalite.plan.split import split_of
from megalite.schedule.actions import Table

log = logging.getLogger("megalite")


def modes_by_stage(config: Config, mesh: Mesh, table: Table) -> dict[int, list[Mode]]:
    """By stage of this rank: the mode of each of its layers. Collective where a budget is set.

    Raises InputError, on all ranks, for a budget that nothing fits.
    """
    train, split, pp = config.train, split_of(config), mesh.coordinates["pp"]
    if train.recompute != "budget":
        mode, n = train.recompute, train.recompute_every
        return {stage: every_nth(mode, n, split[stage]) for stage in table.stages_of(pp)}
    assert train.recompute_budget is not None, "validation asks for it"
    costs, held = measured_costs(config, mesh), held_by_rank(table, split)
    chosen = choose_for_all(costs, held, train.recompute_budget)[pp]
    _tell(costs, held[pp], chosen, train.recompute_budget)
    layers = iter(chosen)
    return {stage: list(islice(layers, split[stage])) for stage in table.stages_of(pp)}


def measured_costs(config: Config, mesh: Mesh) -> dict[Mode, Cost]:
    """What a layer costs in every mode, as rank 0 has measured it; attention is causal over whole samples.

    All ranks run the layer, which may hold collectives, and must come to the same choice, for the same reason.
    """
    model, layout, dtype = config.model, mesh.layout, compute_dtype(config.train.precision)
    stage = Decoder(model, mesh.tp, range(1), first=False, last=False)
    stage.to(dtype).to_empty(device=mesh.device)
    initialize(stage, model, config.run.seed)
    length = model.sequence_length // layout.cp
    attend = attention(config.parallel.context.method, mesh.cp, model.sequence_length, mesh.device)
    places = replace(Places.whole(model, length, mesh.device, dtype), attention=attend)
    shape = (length // layout.tp, config.batch.micro_size, model.width)
    x = torch.ones(shape, dtype=dtype, device=mesh.device, requires_grad=True)
    found = measure(lambda: stage(x, places), stage.layers["0"])
    numbers = torch.tensor(
        [[found[mode].seconds, found[mode].bytes] for mode in MODES], dtype=torch.float64, device=mesh.device
    )
    dist.broadcast(numbers, src=0, group=mesh.world)
    return {mode: Cost(seconds, round(kept)) for mode, (seconds, kept) in zip(MODES, numbers.tolist(), strict=True)}


def _tell(costs: dict[Mode, Cost], held: Sequence[int], chosen: Sequence[Mode], budget: float) -> None:
    for mode, cost in costs.items():
        log.info("recompute %s: %.3f ms, %.2f MiB a layer", mode, 1e3 * cost.seconds, cost.bytes / (1 << 20))
    counts = ", ".join(f"{chosen.count(mode)} {mode}" for mode in MODES)
    log.info(
        "recompute of layers: %s; they keep up to %.3f of %g GiB", counts, kept_bytes(costs, held, chosen) / GIB, budget
    )
