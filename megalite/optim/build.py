"""The optimizer of one rank's parameters."""

from collections.abc import Iterable

import torch
from torch import nn

from megalite.config.schema import Optim


def build_optimizer(stages: Iterable[nn.Module], optim: Optim) -> torch.optim.Optimizer:
    """Fused AdamW (arXiv 1711.05101) in two groups: matrices decay, norms and biases do not."""
    params = [param for stage in stages for param in stage.parameters()]
    matrices = [param for param in params if param.ndim > 1]
    vectors = [param for param in params if param.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    first, second = optim.betas
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=(first, second), eps=optim.eps, fused=True
    )
