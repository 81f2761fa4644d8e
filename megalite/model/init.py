"""Initial values as a pure function of (seed, parameter name, global index).

Every layout, on every device, starts from bit-identical weights, made shard by shard. A counter-based
generator (SplitMix64: Steele, Lea and Flood 2014) gives each element 64 bits. The upper 16 choose an
interval between two quantiles of the normal distribution, and the next 32 choose a point in the interval. This takes
only integer operations, a look-up and exactly rounded products, so values depend on no library's logarithm. Values
stay within 4.5 standard deviations.
"""

from functools import cache
from math import prod
from statistics import NormalDist

import torch
from torch import Tensor, nn

from megalite.config.model_schema import Model
from megalite.parallel.hashes import splitmix, start_of
from megalite.parallel.parameter import box, cut, extra_state, parameters
from megalite.plan.model.parametrization import deviation_of_factor, standard_deviation
from megalite.plan.parts.roles import RoleKind
from megalite_kernels.nf4 import quantize_nf4

BLOCK = 1 << 22  # elements made at a time, to bound the temporaries


@torch.no_grad()
def initialize(stage: nn.Module, model: Model, seed: int) -> None:
    """Fill every tensor of a materialized stage: gains 1, biases, padding and extra state 0, matrices normal."""
    for extra in extra_state(stage):
        extra.value.to_local().zero_()
    for found in parameters(stage):
        name, param, role, shape = found
        local = param.to_local()
        match role.kind:
            case RoleKind.NORM:
                local.fill_(0 if model.norm_gain == "one_plus_weight" else 1)
            case RoleKind.BIAS | RoleKind.MAGNITUDE:
                local.zero_()
            case _ if found.four_bits:
                whole, mine, first = found.values()
                values, std = torch.empty(mine, device=local.device), standard_deviation(model, role)
                fill_normal(values, whole, first, std, f"{seed}/{name}")
                local.copy_(quantize_nf4(values))
            case _:
                local.zero_()
                part = cut(param, shape)
                std = deviation_of_factor(role, shape[-1]) if role.adapts else standard_deviation(model, role)
                fill_normal(part.to_local(), shape, box(part)[1], std, f"{seed}/{name}")


def fill_normal(
    local: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], std: float, key: str, first: int = 0
) -> None:
    """Fill `local`, the box at `offset` of a tensor of `shape`, with its part of the tensor named `key`.

    The tensor is a matrix, or a stack of matrices, which has the values of one matrix of all their rows. first: the
    index of the tensor's first element, if it is one of a stack.
    """
    if local.ndim > 2:
        for number, inner in enumerate(local, offset[0]):
            fill_normal(inner, shape[1:], offset[1:], std, key, first + number * prod(shape[1:]))
        return
    rows, columns = local.shape
    if local.numel() == 0:
        return
    start = start_of(key)
    across = torch.arange(columns, device=local.device) + offset[1]
    quantiles = _quantiles().to(local.device)
    step = max(1, BLOCK // columns)
    for top in range(0, rows, step):
        down = torch.arange(top, min(top + step, rows), device=local.device) + offset[0]
        bits = splitmix(start, first + down[:, None] * shape[1] + across)
        bucket, point = (bits >> 48) & 0xFFFF, ((bits >> 16) & 0xFFFFFFFF).double() * 2.0**-32
        low = quantiles[bucket]
        local[top : top + step] = ((low + (quantiles[bucket + 1] - low) * point) * std).float()


@cache
def _quantiles() -> Tensor:
    """The normal distribution's quantiles at i / 65536; the two ends are at a quarter of a step, not at infinity."""
    count = 1 << 16
    inverse = NormalDist().inv_cdf
    inner = [inverse(i / count) for i in range(1, count)]
    end = inverse(0.25 / count)
    return torch.tensor([end, *inner, -end], dtype=torch.float64)
