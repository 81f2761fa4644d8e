"""Which rank orthogonalizes which matrix under Muon, and what that moves, takes and costs.

The ranks of a pipeline stage, all those with one pp coordinate, share out its matrices. They are counted row-major over
(dp_replicate, fsdp, tp). Every matrix has one owner. It gathers the whole update, orthogonalizes it, and sends every
rank its box of the result. Nothing but the shapes and boxes of whole matrices decides, so all ranks find the same plan.

Matrices are handled in buckets. While the owners compute one bucket, the next one is gathered and the results of the
one before return.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product

from megalite.config.schema import Model
from megalite.plan.shapes import weight_shapes

Box = tuple[range, range]  # rows and columns

BUCKET = 256 << 20  # bytes of a bucket's buffers on a rank: 4 MiB for each of 64 peers fill a link; a GPU has 80 GB
ROW_PARALLEL = ("attention.o.weight", "mlp.down.weight")  # matrices whose columns tp splits; of others it splits rows


@dataclass(frozen=True)
class Matrix:
    """A whole matrix `[rows, columns]`, and the box of it that each rank of the stage holds."""

    shape: tuple[int, int]
    boxes: tuple[Box, ...]
    steps: int = 5  # of Newton–Schulz

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


def elements(box: Box) -> int:
    return len(box[0]) * len(box[1])


@lru_cache(maxsize=256)  # layers are alike
def boxes(shape: tuple[int, ...], mesh: tuple[int, ...], cuts: tuple[tuple[int, int], ...]) -> tuple[Box, ...]:
    """The box of a matrix that each rank of a mesh holds, row-major.

    cuts: pairs (axis of the mesh, dimension), one after the other: the ranks along `axis` share out what the cuts
    before have left of `dimension`, in equal parts but for the last ones, as FSDP2 and `torch.chunk` do.
    """
    return tuple(_box(shape, mesh, cuts, position) for position in product(*map(range, mesh)))


def _box(
    shape: tuple[int, ...], mesh: tuple[int, ...], cuts: tuple[tuple[int, int], ...], position: tuple[int, ...]
) -> Box:
    left = [range(size) for size in shape]
    for axis, dim in cuts:
        each = -(-len(left[dim]) // mesh[axis])
        left[dim] = left[dim][position[axis] * each : (position[axis] + 1) * each]
    rows, columns = left
    return rows, columns


def stage_matrices(
    model: Model, layers: Iterable[int], replicas: int, shards: int, tp: int, steps: int = 5
) -> list[Matrix]:
    """The matrices inside of `layers`, in the order of the model, on a stage of replicas × shards × tp ranks.

    shards: ranks over which parameters are sharded, dp_shard · cp, or 1 with mode ddp, where all are replicas.
    """
    wanted = {str(layer) for layer in layers}
    found = []
    for name, shape in weight_shapes(model).items():
        kind, _, rest = name.partition(".")
        layer, _, weight = rest.partition(".")
        if kind == "layers" and layer in wanted and len(shape) == 2:
            split = 1 if weight in ROW_PARALLEL else 0
            held = boxes(shape, (replicas, shards, tp), ((2, split), (1, 0)))
            found.append(Matrix((shape[0], shape[1]), held, steps))
    return found


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank that each matrix goes to: the most costly first, to the one with the least so far (LPT, Graham 1969).

    No rank has more than the mean and one matrix.
    """
    load, found = [0] * ranks, [0] * len(costs)
    for index in _descending(costs):
        found[index] = load.index(min(load))
        load[found[index]] += costs[index]
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


class Plan:
    """Owners and buckets of `matrices`, of which there is at least one.

    itemsize: bytes of an element on the network and in Newton–Schulz. bucket_bytes: what the buffers of a bucket may
    take on any rank. A bucket is not cut where some rank would have nothing to do, so a single round may take more.
    """

    def __init__(self, matrices: Sequence[Matrix], itemsize: int, bucket_bytes: int = BUCKET) -> None:
        self.matrices, self.itemsize, self.ranks = matrices, itemsize, len(matrices[0].boxes)
        self.owners = owners([matrix.flops for matrix in matrices], self.ranks)
        self.buckets = self._buckets(bucket_bytes)

    def gathered(self, bucket: Iterable[int]) -> list[Piece]:
        """The pieces that owners put together.

        Of replicas, the one that the owner belongs to sends: replicas are the outermost axis, which crosses nodes.
        """
        found = []
        for index in bucket:
            owner = self.owners[index]
            for held, ranks in _holders(self.matrices[index].boxes).items():
                source = owner if owner in ranks else ranks[owner * len(ranks) // self.ranks]
                found.append(Piece(index, source, owner, held))
        return found

    def returned(self, bucket: Iterable[int]) -> list[Piece]:
        """The pieces of results, for every rank that holds a box."""
        return [
            Piece(index, self.owners[index], rank, held)
            for index in bucket
            for held, ranks in _holders(self.matrices[index].boxes).items()
            for rank in ranks
        ]

    def sent(self, rank: int) -> int:
        """Bytes that `rank` sends to others in a step."""
        return self.itemsize * sum(piece.elements for piece in self._moving() if piece.source == rank)

    def received(self, rank: int) -> int:
        """Bytes that `rank` receives from others in a step."""
        return self.itemsize * sum(piece.elements for piece in self._moving() if piece.target == rank)

    def flops(self, rank: int) -> int:
        """Floating-point operations of `rank` in a step; elementwise ones are not counted."""
        return sum(matrix.flops for matrix, owner in zip(self.matrices, self.owners, strict=True) if owner == rank)

    def temporaries(self, rank: int, parameter_bytes: int) -> int:
        """Bytes that a step takes on `rank` at its peak, beside weights, gradients and momentum.

        parameter_bytes: of an element of a parameter.
        """
        there = [self._buffers(self.gathered(bucket), rank) for bucket in self.buckets] + [(0, 0)]
        back = [self._buffers(self.returned(bucket), rank) for bucket in self.buckets] + [(0, 0)]
        part = [self._largest_part(bucket, rank) * parameter_bytes for bucket in self.buckets] + [0]
        peak = sum(there[0]) + 3 * part[0]
        for number, bucket in enumerate(self.buckets):
            before, now, following = sum(back[number - 1]), sum(back[number]), sum(there[number + 1])
            to_owners, of_others = there[number]
            packing = to_owners + of_others + before + following + 3 * part[number + 1]
            computing = of_others + before + following + now + self._working(bucket, rank)
            applying = of_others + back[number - 1][1] + following + now + 2 * part[number - 1]
            peak = max(peak, packing, computing, applying)
        return peak

    def _moving(self) -> Iterator[Piece]:
        everything = range(len(self.matrices))
        pieces = chain(self.gathered(everything), self.returned(everything))
        return (piece for piece in pieces if piece.source != piece.target)

    def _buffers(self, pieces: Sequence[Piece], rank: int) -> tuple[int, int]:
        """Bytes of the buffers of one exchange; where nobody sends to another, what is sent is what is received."""
        sent = sum(piece.elements for piece in pieces if piece.source == rank)
        received = sum(piece.elements for piece in pieces if piece.target == rank)
        return sent * self.itemsize, received * self.itemsize if moves(pieces) else 0

    def _largest_part(self, bucket: Iterable[int], rank: int) -> int:
        return max(elements(self.matrices[index].boxes[rank]) for index in bucket)

    def _working(self, bucket: Iterable[int], rank: int) -> int:
        """Bytes to orthogonalize the largest matrix of `rank`: X and X′, a Gram matrix, and the whole put together."""
        needed = [0]
        for index in bucket:
            m, n = sorted(self.matrices[index].shape)
            if self.owners[index] == rank:
                needed.append(2 * m * n + m * m + (m * n if len(_holders(self.matrices[index].boxes)) > 1 else 0))
        return max(needed) * self.itemsize

    def _buckets(self, bucket_bytes: int) -> list[list[int]]:
        """Rounds, in which no rank owns two matrices, as many in a bucket as `bucket_bytes` allow."""
        rounds: list[list[int]] = []
        for index in _descending([matrix.flops for matrix in self.matrices]):
            if not rounds or self.owners[index] in {self.owners[other] for other in rounds[-1]}:
                rounds.append([])
            rounds[-1].append(index)
        found: list[list[int]] = []
        load = [0] * self.ranks
        for each in rounds:
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
        load = [0] * self.ranks
        for piece in chain(self.gathered(bucket), self.returned(bucket)):
            for rank in (piece.source, piece.target):
                load[rank] += piece.elements * self.itemsize
        return load


def moves(pieces: Iterable[Piece]) -> bool:
    """Whether any rank sends to another."""
    return any(piece.source != piece.target for piece in pieces)
