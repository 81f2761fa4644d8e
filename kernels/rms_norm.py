"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv 1910.07467)."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; x `[…, d]`, weight `[d]`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
