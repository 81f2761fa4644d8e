"""The optimizer of one rank's parameters."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from megalite.config.schema import Optim
from megalite.optim.interface import Optimizer
from megalite.optim.offload import HostAdamW
from megalite.parallel.parameter import Parameter, trainable
from megalite_kernels import FusedAdamW, adamw, apex, fused_adamw


def build_optimizer(stages: Iterable[nn.Module], optim: Optim, kernel: str = "auto") -> Optimizer:
    """The optimizer `optim.name` for what is trained of `stages`. kernel: `kernels.adamw`."""
    groups = decayed_apart([found for stage in stages for found in trainable(stage)], optim.weight_decay)
    first, second = optim.betas
    match optim.name:
        case "adamw" if optim.offload:
            return HostAdamW(groups, optim.lr, (first, second), optim.eps)
        case "adamw":
            others = {"triton": partial(adamw, backend="triton"), "apex": apex.adamw}
            return FusedAdamW(groups, optim.lr, (first, second), optim.eps, update=others.get(kernel, fused_adamw))


def decayed_apart(parameters: Iterable[Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices, which decay, and norms and biases, which do not."""
    both: tuple[dict[str, Any], ...] = (
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    )
    for _, param, role in parameters:
        both[not role.decays]["params"].append(param)
    return [group for group in both if group["params"]]
