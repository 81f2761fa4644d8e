"""Norms of the rows of a matrix that are trained beside its adapter (DoRA, arXiv 2402.09353).

    W' = W + s B A        y = (‖W‖ + m) / ‖W'‖ · x W'ᵀ

Norms are of each row, `[out]`, and none has a gradient (§4.3 there). Trained is m, which begins at 0: rounded to the
precision of compute, a norm itself would change what the base computes. ‖W'‖ is found from W, A and B without a matrix
of W's size:

    ‖W'‖² = ‖W‖² + 2 s Σ (W Aᵀ) ∘ B + s² Σ (B A Aᵀ) ∘ B        sums over the r features of each row
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.collectives import start_all_reduce
from megalite.parallel.parameter import in_four_bits, part
from megalite.parallel.product import sum_over_tokens
from megalite_kernels.backend import wide_dtype
from megalite_kernels.nf4 import dequantize_nf4


def scaled_to_magnitudes(
    y: Tensor,
    magnitudes: Tensor,
    matrix: tuple[Tensor, Tensor, Tensor],
    scale: float,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `y`, outputs `[…, out]` of W', scaled to what is trained.

    magnitudes: m, `[out]`. matrix: parameters W, A and B, of which this rank has `[out, in]`, `[r, in]` and `[out, r]`.
    scale: s. group: ranks that have the other inputs of W; None: this one has all. bias: a parameter `[out]` that y
    has, and that is not scaled.
    """
    weight, first, second = (part(each).detach() for each in matrix)
    before, after = _norms(weight, first, second, scale, group)
    # Without the 1, which y has, so that it is not rounded away.
    change = ((part(magnitudes).to(before.dtype) + (before - after)) / after).to(y.dtype)
    made = _Scaled.apply(y, change)
    return made if bias is None else made.sub_(part(bias) * change)


class _Scaled(torch.autograd.Function):
    """y + change · y, with one pass less in backward than autograd takes, which adds up two gradients of y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, change: Tensor) -> Tensor:
        ctx.save_for_backward(y, change)
        return torch.addcmul(y, y, change)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, change = ctx.saved_tensors
        return torch.addcmul(grad, grad, change), sum_over_tokens(grad * y)


@torch.no_grad()
def _norms(
    weight: Tensor, first: Tensor, second: Tensor, scale: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The norms `[out]` of the rows of W and of W', in float32 or wider."""
    if in_four_bits(weight):
        weight = dequantize_nf4(weight, first.dtype)
    wide = wide_dtype(first.dtype)
    a, b = first.to(wide), second.to(wide)
    squares = torch.linalg.vector_norm(weight, dim=-1, dtype=wide).square()
    added = scale * torch.linalg.vecdot((weight @ first.t()).to(wide).mul_(2).addmm_(b, a @ a.t(), alpha=scale), b)
    if group is not None:
        squares, added = start_all_reduce(torch.stack((squares, added)), group).wait()
    # A row of zeros has no direction: its outputs stay 0.
    return squares.sqrt(), (squares + added).clamp_(min=torch.finfo(wide).tiny).sqrt_()
