"""The five-dimensional layout of ranks, as pure arithmetic.

The map between a rank and its coordinates is written only here; runtime, planner and tests all use it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The degree of every parallel axis, outermost first.

    The order is that of ranks: neighbouring ranks differ in `tp`, so tensor parallelism stays on the fastest links, and
    `pp` crosses nodes.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # ranks of dp_shard · cp · tp that share out experts, neighbours too; no axis of its own

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def dp(self) -> int:
        """The number of ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of `rank` along every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The inverse of `coordinates`; the coordinate along an axis that is left out is 0."""
        rank = 0
        for axis in AXES:
            size, position = getattr(self, axis), coordinates.pop(axis, 0)
            if not 0 <= position < size:
                raise ValueError(f"{axis}={position} is outside an axis of {size}")
            rank = rank * size + position
        if coordinates:
            raise ValueError(f"unknown axis {next(iter(coordinates))!r}; the axes are {', '.join(AXES)}")
        return rank

    def dp_rank(self, rank: int) -> int:
        """The number of the slice of the global batch that `rank` reads: 0 to dp − 1."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def __str__(self) -> str:
        sizes = {**dict(zip(AXES, self.shape, strict=True)), "ep": self.ep}
        return " · ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank"


def shard_dim(sizes: Sequence[int], ranks: int) -> int | None:
    """The dimension along which FSDP2 shards matrices or biases of experts, `[experts, …]` of `sizes`, over `ranks`.

    The first that the ranks divide, so that all hold, gather and reduce as much; None: they divide none.
    """
    return next((dim for dim, size in enumerate(sizes) if size % ranks == 0), None)


def vocabulary_rows(size: int, tp: int) -> int:
    """Rows on each of `tp` ranks for a vocabulary of `size` tokens, with padding: a multiple of VOCABULARY_STEP.

    Tensor cores take tiles of that many columns, and an output layer whose columns are no multiple of 8 is several
    times slower. With fewer than 1,024 tokens on a rank, the step is the largest power of two that adds less than an
    eighth.
    """
    tokens = -(-size // tp)
    step = min(VOCABULARY_STEP, 1 << max(tokens // 8, 1).bit_length() - 1)
    return -(-tokens // step) * step


VOCABULARY_STEP = 128
FOUR_BIT_BLOCK = 64  # inputs of an output that weights in four bits have a maximum for, see `megalite_kernels.nf4`
FLOAT8_MULTIPLES = {  # by train.float8_recipe: all sizes of operands in 8 bits are multiples; mx: numbers of a scale
    "tensorwise": 16,
    "rowwise": 16,
    "mx": 32,
}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
