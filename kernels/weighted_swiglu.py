"""SwiGLU of rows that each count with a score of their own, as in a mixture of experts:

    y = s · silu(g) · u        ds = Σ dy · silu(g) · u        with g and u: s · dy instead of dy, as in `swiglu`

The score is applied before an expert's last matrix, so that nothing of what that returns is needed for its gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.backend import Backend, use_triton, wide_dtype


def reference(gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
    wide = wide_dtype(gate.dtype)
    return (F.silu(gate.to(wide)) * up.to(wide) * scores[:, None].to(wide)).to(gate.dtype)


class _TorchWeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, scores)
        return F.silu(gate).mul_(up).mul_(scores[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, scores = ctx.saved_tensors
        silu = F.silu(gate)
        of_scores = (silu * up).mul_(grad).sum(-1, dtype=scores.dtype)
        weighted = grad.clone().mul_(scores[:, None])
        of_up = silu.mul_(weighted)
        weighted.mul_(up)
        return torch.ops.aten.silu_backward.grad_input(weighted, gate, grad_input=weighted), of_up, of_scores


def weighted_swiglu(gate: Tensor, up: Tensor, scores: Tensor, backend: Backend = "auto") -> Tensor:
    """scores · silu(gate) · up: gate and up `[n, f]` of one data type, scores `[n]` in float32 or wider."""
    use_triton(backend, gate.device)
    weighted: Tensor = _TorchWeightedSwiGLU.apply(gate, up, scores)
    return weighted
