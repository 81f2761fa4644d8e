"""The optimizer of one rank's parameters."""

import torch
from torch import nn

from megalite.config.schema import Optim


def build_optimizer(stage: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Fused AdamW (arXiv 1711.05101) in two groups: matrices decay, norms and biases do not."""
    named = list(stage.named_parameters())
    matrices = [param for _, param in named if param.ndim > 1]
    vectors = [param for _, param in named if param.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    first, second = optim.betas
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=(first, second), eps=optim.eps, fused=True
    )
