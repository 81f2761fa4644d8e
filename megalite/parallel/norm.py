"""RMSNorm over features that tensor parallelism splits: all query or key heads of a token together, as in OLMo 2.

    r = 1 / sqrt(mean(x²) + eps)        y = x · r · w        dx = r · (w · dy − x · r² · mean(x · w · dy))

Means are over the features of all ranks, so forward and backward each sum one number per token over tp.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.collectives import start_all_reduce
from megalite_kernels.backend import times, wide_dtype


def split_rms_norm(x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The norm of `x` `[…, d/t]` times this rank's part `[d/t]` of the weight, and r `[…, 1]`, without a gradient.

    x and r are saved for backward.
    """
    return _SplitNorm.apply(x, weight, eps, group)


def scaled(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """x · r · w, computed as widely as r is and rounded once."""
    normal = times(x.to(inverse.dtype) * inverse, weight)
    return normal if normal.dtype == x.dtype else normal.to(x.dtype)  # see times: `to` may return what it is given


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        wide = x.to(wide_dtype(x.dtype))
        squares = start_all_reduce(torch.linalg.vecdot(wide, wide), group).wait()
        inverse = squares.div_(x.shape[-1] * group.size()).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.group = group
        ctx.save_for_backward(x, weight, inverse)
        ctx.mark_non_differentiable(inverse)
        return scaled(x, inverse, weight), inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normal, grad = x.to(inverse.dtype) * inverse, grad.to(inverse.dtype)
        of_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        products = start_all_reduce(torch.linalg.vecdot(grad, normal), ctx.group).wait()
        along = products.div_(x.shape[-1] * ctx.group.size()).unsqueeze(-1)
        return times(grad.sub_(normal.mul_(along)), inverse).to(x.dtype), of_weight, None, None
