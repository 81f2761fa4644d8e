"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """In few passes, keeping x and one number per row for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normal, grad = x.to(inverse.dtype) * inverse, grad.to(inverse.dtype)
        of_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, normal).div_(x.shape[-1]).unsqueeze(-1)
        return grad.sub_(normal.mul_(along)).mul_(inverse).to(x.dtype), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; x `[…, d]`, weight `[d]`."""
    if x.is_cuda:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)
