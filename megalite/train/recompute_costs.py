"""Measures the time and memory of layers in every mode of recompute, for a budget of memory."""

import logging
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megalite.config.layers import layer_kinds
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.model.positions import TokenPositions
from megalite.parallel.context import attention
from megalite.parallel.fsdp import compute_dtype
from megalite.parallel.recompute import measure
from megalite.parallel.settled_attention import attention_kernels
from megalite.plan.automatic import Costing
from megalite.plan.parts.layer import Layer as PlannedLayer
from megalite.plan.parts.sizes import Sizes
from megalite.plan.recompute_modes import MODES, Costs, ModeCost
from megalite.plan.resolved import Plan, resolve

log = logging.getLogger("megalite")


def plan_for(config: Config, mesh: Mesh, costing: Costing | None = None) -> Plan:
    """The plan of a run, for which layers are measured where `train.recompute_budget` is to be met. Collective.

    costing: what `schedule: auto` searches for, the same on all ranks; None: that of `run.cluster`. Raises InputError
    as `resolve`.
    """
    return resolve(config, lambda: measured_costs(config, mesh), costing=costing or costing_of(config))


def measured_costs(config: Config, mesh: Mesh) -> list[Costs]:
    """Costs of every layer of the model, as rank 0 has measured one layer of each kind. Collective.

    All ranks run the layers, which may hold collectives, and must come to the same choice, for the same reason.
    """
    kinds = layer_kinds(config.model)
    found = {kind: _measured(config, mesh, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    return [found[kind] for kind in kinds]


def _measured(config: Config, mesh: Mesh, layer: int) -> Costs:
    """Measure the costs of layer number `layer`; attention is causal over whole samples.

    Experts are taken in turn: tokens are all alike here, so a router would send them to a few of the ranks.
    """
    model, layout, dtype = config.model, mesh.layout, compute_dtype(config.train.dtype)
    if model.experts is not None:
        model = replace(model, experts=replace(model.experts, force_balance=True))
    alone, kernels, buffers = range(layer, layer + 1), config.kernels_by_operation, config.parallel.experts.buffers
    stage = Decoder(model, mesh.tp, alone, False, False, kernels, mesh.ep, buffers)
    stage.to(dtype).to_empty(device=mesh.device)
    initialize(stage, model, config.run.seed)
    length = model.sequence_length // layout.cp
    kind, method = layer_kinds(model)[layer], config.parallel.context.method
    scores, name = kind.attention.heads.scores, str(layer)
    kernel = attention_kernels(config, mesh.device)[scores].kernel
    attend = attention(method, mesh.cp, model.sequence_length, mesh.device, kind=scores, kernel=kernel)
    positions = replace(TokenPositions.whole(model, length, mesh.device, dtype), attention={scores: attend})
    shape = (length // layout.tp, config.batch.micro_size, model.width)
    x, embedded = (torch.ones(shape, dtype=dtype, device=mesh.device, requires_grad=True) for _ in range(2))
    further = partial(stage.predict, name, stage.layers[name], kind, embedded, positions, x)  # as layers of mtp are run
    found = measure(further if kind.mtp else lambda: stage(x, positions), stage.layers[name])
    sizes = Sizes(config)  # choices of experts are kept in every mode, and not by autograd, which is measured
    choices = sum(
        kept.bytes for part in PlannedLayer(model.width, kind).parts for kept in part.kept(sizes) if kept.remembered
    )
    numbers = torch.tensor(
        [[found[mode].seconds, found[mode].bytes + choices] for mode in MODES], dtype=torch.float64, device=mesh.device
    )
    dist.broadcast(numbers, src=0, group=mesh.world)
    for mode, (seconds, kept) in zip(MODES, numbers.tolist(), strict=True):
        log.info("recompute %s: %.3f ms, %.2f MiB for layer %d", mode, 1e3 * seconds, kept / (1 << 20), layer)
    return {mode: ModeCost(seconds, round(kept)) for mode, (seconds, kept) in zip(MODES, numbers.tolist(), strict=True)}
