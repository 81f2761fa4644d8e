"""Positions of tokens: the angles of rotary position embedding, and which tokens attend to which."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.layers import AttentionKind, layer_kinds
from megalite.config.schema import Model
from megalite.parallel.context import Attention, attention


@dataclass(frozen=True)
class TokenPositions:
    """Angles of the tokens of a micro-batch on this rank, and the attention between them, as stages need them."""

    cos: Tensor  # p 1 1 e/2: one row per token of a sequence, or one per position if `positions` is given
    sin: Tensor
    attention: Mapping[AttentionKind, Attention]  # for every kind of attention that layers here have
    positions: Tensor | None = None  # s b: every token's row of cos and sin; None: token i has row i

    @staticmethod
    def whole(model: Model, length: int, device: torch.device, dtype: torch.dtype) -> "TokenPositions":
        """For sequences of one document each, of which this rank holds the first `length` tokens."""
        kinds = {kind.attention for kind in layer_kinds(model)}
        attends = {kind: attention("ring", None, length, device, kind=kind) for kind in kinds}
        return TokenPositions(*angles(model, torch.arange(length, device=device), dtype), attends)

    def attend(self, layer: int, kind: AttentionKind) -> Attention:
        """The attention of layer number `layer`, which is of this kind."""
        return self.attention[kind]

    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine for every token: `[s, b, 1, e/2]`, or `[s, 1, 1, e/2]` if all sequences share them."""
        if self.positions is None:
            return self.cos, self.sin
        return self.cos[self.positions, 0], self.sin[self.positions, 0]


def frequencies(model: Model, device: torch.device | None = None) -> Tensor:
    """Radians per position of every pair of features, `[e/2]` in float64; scaling lowers low ones as in Llama 3.1."""
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float64, device=device) / model.head_size
    plain = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_length * plain / (2 * math.pi)  # rotations within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divided by the factor, 1: unchanged
    return plain * (keep + (1 - keep) / scaling.factor)


def angles(model: Model, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[p, 1, 1, e/2]` of the angles at `positions` `[p]`, in float32 or the wider `dtype`."""
    turns = positions[:, None, None, None] * frequencies(model, positions.device)
    wide = torch.promote_types(dtype, torch.float32)
    return turns.cos().to(wide), turns.sin().to(wide)
