"""Builds the optimizer of one rank's parameters."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from megalite.config.schema import Optim
from megalite.optim.interface import Optimizer
from megalite.optim.muon import Muon, MuonWithAdamW
from megalite.optim.offload import HostAdamW
from megalite.parallel.parameter import Parameter, trainable
from megalite.plan.states import uses_muon
from megalite_kernels import FusedAdamW, adamw, apex, fused_adamw


def build_optimizer(
    stages: Iterable[nn.Module], optim: Optim, kernel: str = "auto", group: dist.ProcessGroup | None = None
) -> Optimizer:
    """The optimizer `optim.name` for the trained parameters of `stages`.

    kernel: the configuration's `kernels.adamw`. group: all ranks that hold parts of these stages, which Muon needs;
    None: this rank holds them whole.
    """
    parameters = [found for stage in stages for found in trainable(stage)]
    matrices = [found.value for found in parameters if uses_muon(optim, found.role)]
    groups = decayed_apart((found for found in parameters if not uses_muon(optim, found.role)), optim.weight_decay)
    first, second = optim.betas
    if optim.offload:
        return HostAdamW(groups, optim.lr, (first, second), optim.eps)
    others: dict[str, Callable[..., None]] = {"triton": partial(adamw, backend="triton"), "apex": apex.adamw}
    rest = FusedAdamW(groups, optim.lr, (first, second), optim.eps, update=others.get(kernel, fused_adamw))
    if not matrices:
        return rest
    options = optim.muon
    muon = Muon(
        matrices, group, optim.lr, options.momentum, options.nesterov, options.steps, optim.weight_decay, options.scale
    )
    return MuonWithAdamW(muon, rest)


def decayed_apart(parameters: Iterable[Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices, to which weight decay applies, and norms and biases, to which it does not."""
    both: tuple[dict[str, Any], ...] = (
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    )
    for _, param, role in parameters:
        both[not role.decays]["params"].append(param)
    return [group for group in both if group["params"]]
