"""Check that results agree, as far as roundings to a data type allow."""

import math

import torch
from torch import Tensor


def excess(found: Tensor, exact: Tensor, rounded: tuple[torch.dtype, int]) -> float:
    """Return the error of `found` in multiples of the allowed one; infinite if it has nan, inf or another shape.

    rounded: a data type, and how many roundings to it are allowed, each of at most half the distance of two neighbours.
    All elements together may be off by as much, in the L2 norm; any one by four times as much of itself or of the root
    mean square, because it may be a difference of larger terms.
    """
    if found.shape != exact.shape:
        return math.inf
    dtype, roundings = rounded
    allowed = roundings * torch.finfo(dtype).eps / 2
    gap = found.detach().to(exact.dtype) - exact
    size = torch.linalg.vector_norm(exact)
    together = torch.linalg.vector_norm(gap) / size
    typical = size / math.sqrt(max(exact.numel(), 1))
    alone = (gap.abs_() / (exact.abs() + typical)).max() / 4
    worst = torch.maximum(together, alone).item() / allowed
    return worst if math.isfinite(worst) else math.inf
