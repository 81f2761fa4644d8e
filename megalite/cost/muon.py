"""The time that Muon's part of a step takes: what owners of matrices compute, and the exchanges. Imports no torch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


EVERYWHERE = -1  # position of a matrix that ranks do not share out as experts
Holder = tuple[int, int]  # position among the ranks that share out experts, and replica


@dataclass(frozen=True)
class Shared:
    """A matrix that Muon updates, and how the ranks of its stage hold it.

    Replicas are the outermost axis. The ranks of one replica that have a part of the matrix all have as much.
    """

    matrix: Matrix
    replicas: int  # ranks with the same part
    parts: int  # parts that one replica has, each on a rank
    position: int = EVERYWHERE  # experts': position of their ranks among those that share out experts

    @property
    def elements(self) -> int:
        return prod(self.matrix.shape)


def muon_matrices(plan: Plan) -> list[list[Shared]]:
    """The matrices that Muon updates in the layers of each pipeline rank."""
    return [_matrices(plan, rank) for rank in range(plan.config.parallel.pp)]


def muon_seconds(plan: Plan, matrices: Sequence[Sequence[Shared]], timer: Timer) -> float:
    """Seconds in which matrices go to their owners, are orthogonalized, and updates come back, on the fullest rank.

    matrices: those of `muon_matrices`.
    """
    config, layout = plan.config, plan.config.parallel.layout
    ranks, each = layout.world_size // layout.pp, working_bytes(config)
    stages = [(found, owners([one.matrix.flops for one in found], ranks)) for found in matrices]
    flops = max(_flops([one.matrix for one in found], owned_by, symmetric_rows(config)) for found, owned_by in stages)
    sent = max(
        sum(
            timer.net.collective("all_to_all", each * size, Group(ranks, 1)) for size in _exchanged(*stage, ranks, each)
        )
        for stage in stages
    )
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


@dataclass(frozen=True)
class Exchanges:
    """Elements in the two exchanges of a bucket, to owners and back, with those that stay on a rank."""

    owned: Counter[int] = field(default_factory=Counter)  # by owner: elements of its matrices
    returned: Counter[int] = field(default_factory=Counter)  # by owner: elements of all updates that it sends
    sent: Counter[Holder] = field(default_factory=Counter)  # elements of parts that each holder sends to owners
    got: Counter[Holder] = field(default_factory=Counter)  # elements that come back, the same in all replicas

    def __add__(self, other: "Exchanges") -> "Exchanges":
        return Exchanges(
            self.owned + other.owned, self.returned + other.returned, self.sent + other.sent, self.got + other.got
        )

    def add(self, one: Shared, owner: int, ranks: int) -> None:
        """Add a matrix. The owner's replica of it sends, and all get the update."""
        part = one.elements // one.parts
        self.owned[owner] += one.elements
        self.returned[owner] += one.replicas * one.elements
        self.sent[one.position, owner * one.replicas // ranks] += part
        self.got[one.position, 0] += part

    @property
    def load(self) -> int:
        """Elements of all buffers of the fullest rank."""
        return max((self.owned + self.returned).values()) + _of_fullest(self.sent) + _of_fullest(self.got)

    @property
    def to_owners(self) -> int:
        """Elements of the largest buffer in the exchange to owners."""
        return max(*self.owned.values(), _of_fullest(self.sent))

    @property
    def back(self) -> int:
        """Elements of the largest buffer in the exchange back."""
        return max(*self.returned.values(), _of_fullest(self.got))


def _of_fullest(parts: Mapping[Holder, int]) -> int:
    """Elements of a rank that holds the most of experts, and the most of other matrices."""
    experts = max((size for (position, _), size in parts.items() if position != EVERYWHERE), default=0)
    return experts + max((size for (position, _), size in parts.items() if position == EVERYWHERE), default=0)


def _exchanged(matrices: Sequence[Shared], owned_by: Sequence[int], ranks: int, itemsize: int) -> tuple[int, int]:
    """Elements of the fullest rank in all exchanges to owners, one after the other, and in all exchanges back.

    Buckets are about those of `plan/muon.MuonPlan`: all parts of a matrix are counted as equally large, and the fullest
    holder as one rank. Nothing goes to owners if each has its matrices whole.
    """
    buckets: list[Exchanges] = []
    for each in rounds([one.matrix.flops for one in matrices], owned_by):
        more = Exchanges()
        for index in each:
            more.add(matrices[index], owned_by[index], ranks)
        if buckets and itemsize * (both := buckets[-1] + more).load <= BUCKET_BYTES:
            buckets[-1] = both
        else:
            buckets.append(more)
    to_owners = sum(bucket.to_owners for bucket in buckets) if any(one.replicas < ranks for one in matrices) else 0
    return to_owners, sum(bucket.back for bucket in buckets)


def muon_parameters(plan: Plan, rank: int) -> float:
    """The number of elements of a pipeline rank's matrices that each of its ranks updates."""
    parallel, apart, own = plan.config.parallel, 0, 0
    for weight in _weights(plan, rank):
        if weight.role.of_expert and parallel.ep > 1:
            apart += weight.elements
        else:
            own += prod(weight.part(parallel.tp))
    if not parallel.data.sharded:
        return own + apart / parallel.ep
    return own / (parallel.layout.dp_shard * parallel.cp) + apart / parallel.ep / parallel.expert_shards


def _matrices(plan: Plan, rank: int) -> list[Shared]:
    """The whole matrices in the layers of a pipeline rank."""
    config, parallel, layout = plan.config, plan.config.parallel, plan.config.parallel.layout
    ranks, ep, found = layout.world_size // layout.pp, parallel.ep, list[Shared]()
    replicas = layout.dp_replicate if parallel.data.sharded else layout.dp * layout.cp
    for weight in _weights(plan, rank):
        matrices = matrices_of(weight.shape, (), config.optim.muon.steps)
        if weight.role.of_expert:
            shards, on_each = parallel.expert_shards, -(-len(matrices) // ep)
            whole = weight.shard_dim(shards, ep) == 0  # FSDP2 shards the stack by expert
            part = -(-on_each // shards) if whole else on_each
            for index, each in enumerate(matrices):
                position = index // on_each * shards + index % on_each // part
                found.append(Shared(each, ranks // ep // shards, 1 if whole else shards, position))
        else:  # ranks of tensor parallelism have a part each, or all the whole of a matrix that it does not split
            alike = replicas if weight.role.split else replicas * parallel.tp
            found += [Shared(each, alike, ranks // alike) for each in matrices]
    return found


def _weights(plan: Plan, rank: int) -> Iterator[Weight]:
    """The weights in the layers of a pipeline rank that Muon updates."""
    for stage in plan.stages_of(rank):
        for layer in plan.layers[stage]:
            for _, weight in layer_weights(plan.config.model, plan.kinds[layer]):
                if weight.trained and weight.role.kind is RoleKind.MATRIX:
                    yield weight
