"""What every layer of a rank recomputes: as configured, or the least that fits a budget at measured costs."""

import logging
from dataclasses import replace

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
from megalite.plan.activations import Activations
from megalite.plan.pipeline import table_of, tables_of
from megalite.plan.recompute import MODES, Cost, Mode, modes_by_stage
from megalite.plan.split import split_of

log = logging.getLogger("megalite")


def recompute_modes(config: Config, mesh: Mesh) -> dict[int, list[Mode]]:
    """By stage: the mode of each of its layers. Collective where a budget is set.

    Raises InputError, on all ranks, for a budget that nothing fits.
    """
    split = split_of(config)
    outside = Activations(config).outside(len(split))
    modes = modes_by_stage(
        config.train, lambda: tables_of(config), split, outside, lambda: measured_costs(config, mesh)
    )
    if config.train.recompute == "budget":
        chosen = [mode for stage in table_of(config).stages_of(mesh.coordinates["pp"]) for mode in modes[stage]]
        log.info("recompute of layers: %s", ", ".join(f"{chosen.count(mode)} {mode}" for mode in MODES))
    return modes


def measured_costs(config: Config, mesh: Mesh) -> dict[Mode, Cost]:
    """What a layer costs in every mode, as rank 0 has measured it; attention is causal over whole samples.

    All ranks run the layer, which may hold collectives, and must come to the same choice, for the same reason.
    """
    model, layout, dtype = config.model, mesh.layout, compute_dtype(config.train.precision)
    stage = Decoder(model, mesh.tp, range(1), first=False, last=False, kernels=config.kernels_by_operation)
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
    for mode, (seconds, kept) in zip(MODES, numbers.tolist(), strict=True):
        log.info("recompute %s: %.3f ms, %.2f MiB a layer", mode, 1e3 * seconds, kept / (1 << 20))
    return {mode: Cost(seconds, round(kept)) for mode, (seconds, kept) in zip(MODES, numbers.tolist(), strict=True)}
