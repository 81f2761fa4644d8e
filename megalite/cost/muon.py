"""The time that Muon's part of a step takes: what owners of matrices compute, and the exchanges. Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from math import inf, prod

from megalite.config.schema import Config
from megalite.cost.network import Group
from megalite.cost.stages import Timer
from megalite.plan.model.weights import layer_weights
from megalite.plan.muon import Matrix, matrices_of, owners, working_bytes
from megalite.plan.parts.roles import RoleKind
from megalite.plan.resolved import Plan

RATE_SHARE = 0.8  # rate of the Newton–Schulz iteration relative to large products: one H200, Llama 3.2 1B
SYMMETRIC_ROWS = 3072  # the least of a matrix whose symmetric products `megalite_kernels.symmetric_product` halves
# Bytes of a parameter that PyTorch's operations move more than Triton's kernels, which move 28 as AdamW's do.
TORCH_SURPLUS = 72


def muon_matrices(plan: Plan) -> list[list[Matrix]]:
    """The whole matrices that Muon updates in the layers of each pipeline rank."""
    return [_matrices(plan, rank) for rank in range(plan.config.parallel.pp)]


def muon_seconds(plan: Plan, matrices: Sequence[Sequence[Matrix]], timer: Timer) -> float:
    """Seconds in which matrices go to their owners, are orthogonalized, and updates come back, on the fullest rank.

    matrices: those of `muon_matrices`. A matrix whole on every rank of its stage goes nowhere before; each replica of a
    part is sent its update.
    """
    config, layout = plan.config, plan.config.parallel.layout
    ranks = layout.world_size // layout.pp
    replicas = layout.dp_replicate if config.parallel.data.sharded else layout.dp * layout.cp
    flops, owned = _most(matrices, ranks, symmetric_rows(config))
    moved = (replicas, 1) if ranks > replicas else (replicas,)
    size, group = working_bytes(config) * owned, Group(ranks, 1)
    sent = sum(timer.net.collective("all_to_all", size * copies, group) for copies in moved)
    return flops / (timer.kernels.rate("bf16") * RATE_SHARE) + sent


def symmetric_rows(config: Config) -> float:
    """The least number of rows of a matrix, its shorter side, whose symmetric products are computed by half."""
    kernel = config.kernels_by_operation.muon
    if kernel == "torch" or config.train.precision == "fp64" or config.run.device == "cpu":
        return inf
    return SYMMETRIC_ROWS if kernel == "auto" else 0


def computed_flops(matrix: Matrix, halved_from: float) -> int:
    """Floating-point operations to orthogonalize a matrix, with two products of three, X Xᵀ and A², halved if it has
    so many rows.
    """
    m, n = sorted(matrix.shape)
    return matrix.flops - (matrix.steps * m * m * (n + m) if m >= halved_from else 0)


def _most(matrices: Sequence[Sequence[Matrix]], ranks: int, halved_from: float) -> tuple[int, int]:
    """FLOPs of Muon on the rank of a stage that has most of them, and elements of the one that owns most."""
    work = most = 0
    for found in matrices:
        flops, elements = Counter[int](), Counter[int]()
        for matrix, owner in zip(found, owners([matrix.flops for matrix in found], ranks), strict=True):
            flops[owner] += computed_flops(matrix, halved_from)
            elements[owner] += prod(matrix.shape)
        work, most = max(work, 0, *flops.values()), max(most, 0, *elements.values())
    return work, most


def muon_parameters(matrices: Sequence[Matrix], tp: int) -> float:
    """The number of elements of a pipeline rank's matrices that one of `tp` ranks updates, before they are sharded."""
    return sum(prod(matrix.shape) for matrix in matrices) / tp


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
