"""The time that Muon's part of a step takes: what owners of matrices compute, and the exchanges. Imports no torch."""

from collections import Counter
from math import prod

from megalite.cost.network import Group
from megalite.cost.stages import Timer
from megalite.plan.model.roles import RoleKind
from megalite.plan.model.weights import layer_weights
from megalite.plan.muon import Matrix, matrices_of, owners, working_bytes
from megalite.plan.resolved import Plan

RATE_SHARE = 0.5  # rate of the Newton–Schulz iteration relative to large products; an assumption


def muon_seconds(plan: Plan, timer: Timer) -> float:
    """Seconds in which matrices go to their owners, are orthogonalized, and updates come back, on the fullest rank.

    A matrix whole on every rank of its stage goes nowhere before; each replica of a part is sent its update.
    """
    config, layout = plan.config, plan.config.parallel.layout
    ranks = layout.world_size // layout.pp
    replicas = layout.dp_replicate if config.parallel.data.sharded else layout.dp * layout.cp
    flops, owned = _most(plan, ranks)
    moved = (replicas, 1) if ranks > replicas else (replicas,)
    size, group = working_bytes(config) * owned, Group(ranks, 1)
    sent = sum(timer.net.collective("all_to_all", size * copies, group) for copies in moved)
    return flops / (timer.kernels.rate("bf16") * RATE_SHARE) + sent


def _most(plan: Plan, ranks: int) -> tuple[int, int]:
    """FLOPs of Muon on the rank of a stage that has most of them, and elements of the one that owns most."""
    work = most = 0
    for rank in range(plan.config.parallel.pp):
        matrices = _matrices(plan, rank)
        flops, elements = Counter[int](), Counter[int]()
        for matrix, owner in zip(matrices, owners([matrix.flops for matrix in matrices], ranks), strict=True):
            flops[owner] += matrix.flops
            elements[owner] += prod(matrix.shape)
        work, most = max(work, 0, *flops.values()), max(most, 0, *elements.values())
    return work, most


def muon_parameters(plan: Plan, rank: int) -> float:
    """The number of elements that Muon updates on a pipeline rank, before data-parallel sharding."""
    return sum(prod(matrix.shape) for matrix in _matrices(plan, rank)) / plan.config.parallel.tp


def _matrices(plan: Plan, rank: int) -> list[Matrix]:
    """The whole matrices in the layers of a pipeline rank."""
    return [
        matrix
        for stage in plan.stages_of(rank)
        for layer in plan.layers[stage]
        for _, weight in layer_weights(plan.config.model, plan.kinds[layer])
        if weight.trained and weight.role.kind is RoleKind.MATRIX
        for matrix in matrices_of(weight.shape, (), plan.config.optim.muon.steps)
    ]
