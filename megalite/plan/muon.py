"""Owner of each matrix, the rank that orthogonalizes it under Muon, with the bytes moved, the memory and the FLOPs.

All ranks with the same pp coordinate share out the matrices that they hold. These ranks are counted row-major over
(dp_replicate, fsdp, tp). Every matrix has one owner. The owner gathers the whole update, orthogonalizes it, and sends
every rank its box of the result. The plan depends on nothing but global shapes and boxes, so all ranks find the same.

Matrices are handled in buckets. While owners compute one bucket, the next one is gathered, and the results of the one
before return.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product

from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.plan.model.weights import layer_weights
from megalite.plan.parts.roles import RoleKind
from megalite.plan.resolved import Plan
from megalite.plan.state_streams import DEVICE_SLOTS, slot_bytes

Box = tuple[range, ...]  # rows and columns; of a stack of matrices, its other dimensions before them

BUCKET_BYTES = 256 << 20  # bytes of a rank's buffers: enough for messages of a MiB to 64 peers, little beside 80 GB
PACKED_COPIES = 3  # copies of a part that exist while u is packed
MAX_PIECES = 100_000  # pieces of matrices on ranks that are planned one by one, which takes a second


@dataclass(frozen=True)
class Matrix:
    """A whole matrix `[rows, columns]`, and the box of it that each rank of the stage holds."""

    shape: tuple[int, int]
    boxes: tuple[Box, ...]
    steps: int = 5  # steps of Newton–Schulz

    @property
    def flops(self) -> int:
        """Floating-point operations to orthogonalize it.

        With m ≤ n, a step multiplies X Xᵀ and (bA + cA²) X, 2m²n each, and A², 2m³.
        """
        m, n = sorted(self.shape)
        return self.steps * 2 * m * m * (2 * n + m)


@dataclass(frozen=True)
class Piece:
    """A box of a matrix that one rank sends to another, or keeps."""

    matrix: int  # its index in the plan
    source: int
    target: int
    box: Box

    @property
    def elements(self) -> int:
        return elements(self.box)


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank's buffers in one exchange."""

    packed: int  # while they are filled
    under_way: int
    arrived: int


NO_BUFFERS = Buffers(0, 0, 0)


def elements(box: Box) -> int:
    """The number of elements in a box of a matrix."""
    return len(box[0]) * len(box[1])


@lru_cache(maxsize=256)  # layers are alike
def boxes(shape: tuple[int, ...], mesh: tuple[int, ...], cuts: tuple[tuple[int, int], ...]) -> tuple[Box, ...]:
    """The box of a matrix, or of a stack, that each rank of a mesh holds; ranks are counted row-major.

    cuts: pairs (axis of the mesh, dimension of the tensor), applied one after the other. Ranks along the axis share out
    what earlier cuts have left of the dimension. Parts are equal but for the last ones, which are shorter or empty, as
    with FSDP2 and `torch.chunk`.
    """
    return tuple(_box(shape, mesh, cuts, position) for position in product(*map(range, mesh)))


def _box(
    shape: tuple[int, ...], mesh: tuple[int, ...], cuts: tuple[tuple[int, int], ...], position: tuple[int, ...]
) -> Box:
    left = [range(size) for size in shape]
    for axis, dim in cuts:
        each = -(-len(left[dim]) // mesh[axis])
        left[dim] = left[dim][position[axis] * each : (position[axis] + 1) * each]
    return tuple(left)


def matrices_of(shape: tuple[int, ...], boxes: Sequence[Box], steps: int = 5) -> list[Matrix]:
    """The matrices of a stack `[..., rows, columns]`, of which every rank holds a box; of a matrix, itself."""
    *stacked, rows, columns = shape
    return [
        Matrix((rows, columns), tuple(_within(box, place) for box in boxes), steps)
        for place in product(*map(range, stacked))
    ]


def _within(box: Box, place: Sequence[int]) -> Box:
    """The part of one matrix, at `place` in a stack, in a box of the stack."""
    *stacked, rows, columns = box
    inside = all(at in held for at, held in zip(place, stacked, strict=True))
    return (rows, columns) if inside else (range(0), range(0))


def stage_matrices(
    model: Model, layers: Iterable[int], replicas: int, shards: int, tp: int, steps: int = 5, ep: int = 1
) -> list[Matrix]:
    """The matrices inside of `layers`, in the order of the model, on a stage of replicas × shards × tp ranks.

    shards: ranks over which parameters are sharded, dp_shard · cp, or 1 with mode ddp, where all are replicas. ep:
    ranks that share out experts, the others with the same ones being shards or, with mode ddp, replicas.
    """
    kinds, found = layer_kinds(model), list[Matrix]()
    own = (replicas, shards, tp)
    apart = (replicas * tp // ep, 1, ep) if shards == 1 else (replicas, shards * tp // ep, ep)
    for layer in layers:
        for _, weight in layer_weights(model, kinds[layer]):
            if weight.trained and weight.role.kind is RoleKind.MATRIX:
                if weight.role.of_expert:
                    mesh = apart if ep > 1 else own
                    held = boxes(weight.shape, mesh, ((2, 0), (1, weight.shard_dim(mesh[1], ep))))
                else:
                    held = boxes(weight.shape, own, ((1, 0),) if weight.role.copied else ((2, weight.split), (1, 0)))
                found += matrices_of(weight.shape, held, steps)
    return found


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank that owns each matrix.

    Matrices are assigned in order of cost, the most costly first, each to the rank with the least work so far (Graham
    1969). So no rank has more work than the mean plus one matrix. Ties go to the first matrix and the first rank.
    """
    load, found = [0] * min(ranks, len(costs)), [0] * len(costs)  # ranks beyond own nothing
    for index in _descending(costs):
        found[index] = load.index(min(load))
        load[found[index]] += costs[index]
    return found


def rounds(costs: Sequence[int], owned_by: Sequence[int]) -> list[list[int]]:
    """Matrices by round, the most costly first. In a round no rank owns two matrices. owned_by: by matrix, its rank."""
    found: list[list[int]] = []
    for index in _descending(costs):
        if not found or owned_by[index] in {owned_by[other] for other in found[-1]}:
            found.append([])
        found[-1].append(index)
    return found


def _descending(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: -costs[index])


@lru_cache(maxsize=256)  # layers are alike
def _holders(boxes: tuple[Box, ...]) -> dict[Box, list[int]]:
    """The ranks that hold each box, without those that hold nothing."""
    found: dict[Box, list[int]] = {}
    for rank, held in enumerate(boxes):
        if elements(held):
            found.setdefault(held, []).append(rank)
    return found


class MuonPlan:
    """Owners and buckets of `matrices`, of which there is at least one.

    itemsize: bytes of an element on the network and in Newton–Schulz. bucket_bytes: limit for the buffers of a bucket
    on every rank. A bucket may exceed it only if no rank owns two of its matrices: smaller buckets would leave ranks
    without work.
    """

    def __init__(self, matrices: Sequence[Matrix], itemsize: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.matrices, self.itemsize, self.ranks = matrices, itemsize, len(matrices[0].boxes)
        self.owners = owners([matrix.flops for matrix in matrices], self.ranks)
        self.buckets = self._buckets(bucket_bytes)

    def gathered(self, bucket: Iterable[int]) -> list[Piece]:
        """The pieces from which owners put their matrices together.

        Several replicas may hold the same box. The replica of the owner sends it, since replicas are the outermost axis
        and other ones may be on other nodes.
        """
        found = []
        for index in bucket:
            owner = self.owners[index]
            for held, ranks in _holders(self.matrices[index].boxes).items():
                source = owner if owner in ranks else ranks[owner * len(ranks) // self.ranks]
                found.append(Piece(index, source, owner, held))
        return found

    def returned(self, bucket: Iterable[int]) -> list[Piece]:
        """The pieces of results that owners send to every rank that holds a box."""
        return [
            Piece(index, self.owners[index], rank, held)
            for index in bucket
            for held, ranks in _holders(self.matrices[index].boxes).items()
            for rank in ranks
        ]

    def sent(self) -> list[int]:
        """Bytes that each rank sends to others in a step."""
        return [self.itemsize * out for out, _ in self._sizes(self._moving())]

    def received(self) -> list[int]:
        """Bytes that each rank receives from others in a step."""
        return [self.itemsize * into for _, into in self._sizes(self._moving())]

    def flops(self) -> list[int]:
        """Floating-point operations of each rank in a step; elementwise ones are not counted."""
        found = [0] * self.ranks
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            found[owner] += matrix.flops
        return found

    def temporaries(self, parameter_bytes: int) -> list[int]:
        """Bytes that a step takes on each rank at its peak, beside weights, gradients, momentum and its slots.

        parameter_bytes: bytes of one element of a parameter. The step counted clips gradients and may be skipped.
        """
        there = [*(self._buffers(self.gathered(bucket)) for bucket in self.buckets), [NO_BUFFERS] * self.ranks]
        back = [*(self._buffers(self.returned(bucket)) for bucket in self.buckets), [NO_BUFFERS] * self.ranks]
        found = []
        for rank in range(self.ranks):
            part = [parameter_bytes * self._largest_part(bucket, rank) for bucket in self.buckets] + [0]
            working = [self._working(bucket, rank) for bucket in self.buckets]
            to, of = [each[rank] for each in there], [each[rank] for each in back]
            found.append(_peak(to, of, part, working))
        return found

    def _moving(self) -> Iterator[Piece]:
        everything = range(len(self.matrices))
        pieces = chain(self.gathered(everything), self.returned(everything))
        return (piece for piece in pieces if piece.source != piece.target)

    def _sizes(self, pieces: Iterable[Piece]) -> list[tuple[int, int]]:
        """Elements that each rank sends and receives."""
        out, into = [0] * self.ranks, [0] * self.ranks
        for piece in pieces:
            out[piece.source] += piece.elements
            into[piece.target] += piece.elements
        return list(zip(out, into, strict=True))

    def _buffers(self, pieces: Sequence[Piece]) -> list[Buffers]:
        """The buffers of each rank in one exchange. If no rank sends to another, there is one buffer only."""
        sizes = [(self.itemsize * out, self.itemsize * into) for out, into in self._sizes(pieces)]
        if moves(pieces):
            return [Buffers(out, out + into, into) for out, into in sizes]
        return [Buffers(out, out, out) for out, _ in sizes]

    def _largest_part(self, bucket: Iterable[int], rank: int) -> int:
        return max(elements(self.matrices[index].boxes[rank]) for index in bucket)

    def _working(self, bucket: Iterable[int], rank: int) -> int:
        """Bytes to orthogonalize the largest matrix that `rank` owns: X before and after a step, a Gram matrix, and the
        whole update where it is put together from pieces.
        """
        needed = [0]
        for index in bucket:
            m, n = sorted(self.matrices[index].shape)
            if self.owners[index] == rank:
                needed.append(2 * m * n + m * m + (m * n if len(_holders(self.matrices[index].boxes)) > 1 else 0))
        return max(needed) * self.itemsize

    def _buckets(self, bucket_bytes: int) -> list[list[int]]:
        """Matrices by bucket, in as many rounds as `bucket_bytes` allow."""
        found: list[list[int]] = []
        load = [0] * self.ranks
        for each in rounds([matrix.flops for matrix in self.matrices], self.owners):
            more = self._load(each)
            both = [a + b for a, b in zip(load, more, strict=True)]
            if found and max(both) <= bucket_bytes:
                found[-1] += each
                load = both
            else:
                found.append(each)
                load = more
        return found

    def _load(self, bucket: Sequence[int]) -> list[int]:
        """Bytes of the buffers that a bucket needs on every rank."""
        pieces = chain(self.gathered(bucket), self.returned(bucket))
        return [self.itemsize * (out + into) for out, into in self._sizes(pieces)]


def moves(pieces: Iterable[Piece]) -> bool:
    """Return whether any rank sends to another."""
    return any(piece.source != piece.target for piece in pieces)


def _peak(there: Sequence[Buffers], back: Sequence[Buffers], part: Sequence[int], working: Sequence[int]) -> int:
    """The most bytes of one rank while `optim.muon` goes through the buckets.

    part: the largest part of a parameter in each bucket. PACKED_COPIES of it exist while its update is packed, and
    two while it is applied. working: bytes to orthogonalize. All sequences but `working` end with an empty entry, which
    stands for what comes after the last bucket and, as index −1, for what comes before the first.
    """
    peak = max(there[0].packed + PACKED_COPIES * part[0], there[0].under_way)
    for k in range(len(working)):
        packing = max(there[k + 1].packed + PACKED_COPIES * part[k + 1], there[k + 1].under_way)
        computing = max(back[k].packed + working[k], back[k].under_way)
        peak = max(
            peak,
            there[k].under_way + back[k - 1].under_way + packing,
            there[k].arrived + back[k - 1].under_way + there[k + 1].under_way + computing,
            there[k].arrived + back[k - 1].arrived + 2 * part[k - 1] + there[k + 1].under_way + back[k].under_way,
        )
    return max(peak, there[-2].arrived + back[-2].arrived + 2 * part[-2])


def step_temporaries(plan: Plan, pp: int, slot: int = 0) -> int:
    """Bytes that the optimizer takes for a step on the fullest rank of pipeline rank `pp`.

    slot: bytes of each slot through which states pass; 0: they are on the device. Parameters on the host pass through
    as many with their gradients; with Muon these pass apart, so through twice as many. With very many pieces, planning
    every exchange takes too long. The result is then a bound: the buffers of three buckets, and the bytes that the
    largest matrix takes.
    """
    config, matrices = plan.config, _matrices_of_rank(plan, pp)
    streams = 1 + config.on_host(trained=True) * (2 if matrices else 1)
    slots = streams * DEVICE_SLOTS * slot if matrices or config.optim.update_on == "device" else 0
    if not matrices:
        return slots
    itemsize = working_bytes(config)
    if len(matrices) * len(matrices[0].boxes) <= MAX_PIECES:
        return slots + max(MuonPlan(matrices, itemsize).temporaries(_parameter_bytes(config)))
    m, n = max(sorted(matrix.shape) for matrix in matrices)
    return slots + 3 * BUCKET_BYTES + itemsize * (3 * m * n + m * m)


def streaming_slot(plan: Plan, pp: int) -> int:
    """Bytes of a slot through which states pass that live outside of the device, on the fullest rank of `pp`."""
    parts = (max(map(elements, matrix.boxes)) for matrix in _matrices_of_rank(plan, pp))
    return slot_bytes(max(parts, default=0) * _parameter_bytes(plan.config))


def _parameter_bytes(config: Config) -> int:
    return 8 if config.train.precision == "fp64" else 4


def _matrices_of_rank(plan: Plan, pp: int) -> list[Matrix]:
    """The matrices that Muon updates on pipeline rank `pp`."""
    config, layout = plan.config, plan.config.parallel.layout
    if config.optim.name != "muon":
        return []
    shards = layout.dp_shard * layout.cp if config.parallel.data.sharded else 1
    replicas = layout.dp * layout.cp // shards
    return [
        matrix
        for stage in plan.stages_of(pp)
        for matrix in stage_matrices(
            config.model, plan.layers[stage], replicas, shards, layout.tp, ep=config.parallel.ep
        )
    ]


def working_bytes(config: Config) -> int:
    """Bytes of an element on the network and in Newton–Schulz; `optim.newton_schulz.working_dtype` has the reasons."""
    if config.train.precision == "fp64":
        return 8
    return 2 if config.run.device == "cuda" else 4
