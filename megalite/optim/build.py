"""The optimizer of one rank's parameters."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from megalite.config.schema import Optim
from megalite.optim.offload import HostAdamW
from megalite_kernels import FusedAdamW, adamw, apex, fused_adamw


def build_optimizer(stages: Iterable[nn.Module], optim: Optim, kernel: str = "auto") -> torch.optim.Optimizer:
    """Fused AdamW (arXiv 1711.05101) in two groups: matrices decay, norms and biases do not.

    With `optim.offload` it runs on the host. kernel: `kernels.adamw`.
    """
    params = [param for stage in stages for param in stage.parameters()]
    matrices = [param for param in params if param.ndim > 1]
    vectors = [param for param in params if param.ndim == 1]
    both = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in both if group["params"]]
    first, second = optim.betas
    if optim.offload:
        return HostAdamW(groups, optim.lr, (first, second), optim.eps)
    others = {"triton": partial(adamw, backend="triton"), "apex": apex.adamw}
    return FusedAdamW(groups, optim.lr, (first, second), optim.eps, update=others.get(kernel, fused_adamw))
