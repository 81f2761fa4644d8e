"""Angles of rotary position embedding, with Llama 3.1's stretching of low frequencies."""

import math

import torch
from torch import Tensor

from megalite.config.schema import Model


def frequencies(model: Model, device: torch.device | None = None) -> Tensor:
    """Radians per position of every pair of features, `[e/2]` in float64."""
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float64, device=device) / model.head_size
    plain = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_length * plain / (2 * math.pi)  # within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: stretched by the factor, 1: left alone
    return plain * (keep + (1 - keep) / scaling.factor)


def angles(model: Model, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[s, e/2]` of every position's angles, in float32 or the wider `dtype`."""
    turns = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies(model, device)
    wide = torch.promote_types(dtype, torch.float32)
    return turns.cos().to(wide), turns.sin().to(wide)
