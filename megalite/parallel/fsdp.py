"""FSDP2 over the data-parallel ranks: what is gathered when, in which precision, and how gradients reduce."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megalite.config.schema import DataParallel
from megalite.dist.mesh import Mesh

Precision = Literal["bf16", "fp32", "fp64"]


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Type of the sharded parameters, their gradients and the optimizer's states."""
    return torch.float64 if precision == "fp64" else torch.float32


def compute_dtype(precision: Precision) -> torch.dtype:
    """Type of gathered weights and activations."""
    return torch.bfloat16 if precision == "bf16" else parameter_dtype(precision)


def shard(stage: nn.Module, groups: Iterable[nn.Module], mesh: Mesh, precision: Precision, data: DataParallel) -> None:
    """Shard the parameters of `stage` over the data-parallel ranks, in place.

    Each of `groups` is gathered by itself, the rest with the stage. Gradients are summed, not averaged: the
    loss already is divided by the tokens of the whole step. A single data-parallel rank without mixed
    precision is left alone.
    """
    if mesh.data.size() == 1 and compute_dtype(precision) == parameter_dtype(precision):
        return
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(precision), reduce_dtype=parameter_dtype(precision), cast_forward_inputs=False
    )
    for module in groups:
        fully_shard(module, mesh=mesh.data, mp_policy=policy, reshard_after_forward=data.mode == "zero3")
    fully_shard(stage, mesh=mesh.data, mp_policy=policy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def before_backward(stage: object, last: bool, data: DataParallel) -> None:
    """Say whether the coming backward of `stage` reduces gradients and whether it is the step's last."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last or data.reduce == "micro_batch")
        stage.set_reshard_after_backward(last or data.mode == "zero3")
