"""Statistics of the values of tensors, in float64, piece by piece, so that memory does not grow with a tensor."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 18  # elements, so that a piece and its temporaries stay in the cache


@dataclass(frozen=True)
class Statistics:
    """L2 norm and largest magnitude of the finite elements, and how many are not finite."""

    norm: float
    largest: float
    nan: int
    infinite: int

    @property
    def finite(self) -> bool:
        return self.nan == self.infinite == 0


@dataclass(frozen=True)
class Difference:
    """Distances between two tensors."""

    largest: float  # difference of two elements; infinite if only one is finite, or both are not and differ
    relative: float  # `largest`, relative to the largest finite magnitude in both tensors
    bitwise: bool  # whether both have the same bits and data type


def statistics(tensor: Tensor) -> Statistics:
    """The statistics of a tensor of any data type and shape on the CPU."""
    norm, largest, nan, infinite = 0.0, 0.0, 0, 0
    for start in range(0, tensor.numel(), PIECE):
        piece = _piece(tensor, start)
        if not math.isfinite(torch.linalg.vector_norm(piece)):  # otherwise all elements are finite
            nan += int(piece.isnan().sum())
            infinite += int(piece.isinf().sum())
            piece = _finite_magnitudes(piece)
        norm = math.hypot(norm, float(torch.linalg.vector_norm(piece)))
        largest = max(largest, float(piece.abs().max()))
    return Statistics(norm, largest, nan, infinite)


def difference(one: Tensor, other: Tensor) -> Difference:
    """The difference of two tensors of one shape on the CPU. Two NaN, or two equal infinities, do not differ."""
    if one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other)):
        return Difference(0.0, 0.0, True)
    largest, scale = 0.0, 0.0
    for start in range(0, one.numel(), PIECE):
        a, b = _piece(one, start), _piece(other, start)
        same = (a == b) | (a.isnan() & b.isnan())
        gap = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
        largest = max(largest, float(gap.max()))
        scale = max(scale, float(_finite_magnitudes(a).max()), float(_finite_magnitudes(b).max()))
    return Difference(largest, largest / scale if scale else largest, False)


def _piece(tensor: Tensor, start: int) -> Tensor:
    return tensor.reshape(-1)[start : start + PIECE].double()


def _finite_magnitudes(piece: Tensor) -> Tensor:
    return torch.where(piece.isfinite(), piece.abs(), 0.0)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
