"""The time that Muon's part of a step takes: what owners of matrices compute, and the exchanges. Imports no torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf, prod

from megalite.config.schema import Config
from megalite.cost.network import Group
from megalite.cost.stages import Timer
from megalite.plan.model.weights import layer_weights
from megalite.plan.muon import BUCKET_BYTES, Matrix, matrices_of, owners, rounds, working_bytes
from megalite.plan.parts.part import Weight
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
    each, stages = working_bytes(config), [(found, owners([one.flops for one in found], ranks)) for found in matrices]
    flops = max(_flops(*stage, symmetric_rows(config)) for stage in stages)
    moved = (replicas, 1) if ranks > replicas else (replicas,)
    size, group = each * max(_exchanged(*stage, ranks, replicas, each) for stage in stages), Group(ranks, 1)
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


def _flops(matrices: Sequence[Matrix], owned_by: Sequence[int], halved_from: float) -> int:
    """FLOPs of Muon on the rank of a stage that has most of them."""
    flops = Counter[int]()
    for matrix, owner in zip(matrices, owned_by, strict=True):
        flops[owner] += computed_flops(matrix, halved_from)
    return max(flops.values(), default=0)


def _exchanged(matrices: Sequence[Matrix], owned_by: Sequence[int], ranks: int, replicas: int, itemsize: int) -> int:
    """Elements that are exchanged one after the other: in every bucket, those of the owner that has most.

    Buckets are about those of `plan/muon.MuonPlan`: every rank's part of a matrix is counted as equally large.
    """
    sizes, sent = [prod(matrix.shape) for matrix in matrices], 0
    owned, parts = Counter[int](), 0.0
    for each in rounds([matrix.flops for matrix in matrices], owned_by):
        more = Counter({owned_by[index]: sizes[index] for index in each})
        of_parts = 2 * replicas / ranks * more.total()
        load = (1 + replicas) * max((owned + more).values()) + parts + of_parts
        if owned and itemsize * load <= BUCKET_BYTES:
            owned, parts = owned + more, parts + of_parts
        else:
            sent += max(owned.values(), default=0)
            owned, parts = more, of_parts
    return sent + max(owned.values(), default=0)


def muon_parameters(plan: Plan, rank: int) -> float:
    """The number of elements of a pipeline rank's matrices that each of its ranks updates."""
    parallel, apart, own = plan.config.parallel, 0, 0
    for weight in _weights(plan, rank):
        if weight.role.of_expert and parallel.ep > 1:
            apart += weight.elements
        else:
            own += weight.elements
    if not parallel.data.sharded:
        return own / parallel.tp + apart / parallel.ep
    return own / parallel.tp / (parallel.layout.dp_shard * parallel.cp) + apart / parallel.ep / parallel.expert_shards


def _matrices(plan: Plan, rank: int) -> list[Matrix]:
    """The whole matrices in the layers of a pipeline rank."""
    steps = plan.config.optim.muon.steps
    return [matrix for weight in _weights(plan, rank) for matrix in matrices_of(weight.shape, (), steps)]


def _weights(plan: Plan, rank: int) -> Iterator[Weight]:
    """The weights in the layers of a pipeline rank that Muon updates."""
    for stage in plan.stages_of(rank):
        for layer in plan.layers[stage]:
            for _, weight in layer_weights(plan.config.model, plan.kinds[layer]):
                if weight.trained and weight.role.kind is RoleKind.MATRIX:
                    yield weight
