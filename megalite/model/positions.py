"""Where tokens stand: the angles of rotary position embedding, and which tokens attend to which."""

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
    """What stages are told about the tokens of a micro-batch, at the positions that this rank holds."""

    cos: Tensor  # p 1 1 e/2: of every position of the tokens, in order, or of all that there are
    sin: Tensor
    attention: Mapping[AttentionKind, Attention]  # of every kind of the layers here
    positions: Tensor | None = None  # s b: the row of cos and sin of every token; None: token i has row i

    @staticmethod
    def whole(model: Model, length: int, device: torch.device, dtype: torch.dtype) -> "TokenPositions":
        """Of sequences of one document that this rank holds from their beginning."""
        kinds = {kind.attention for kind in layer_kinds(model)}
        attends = {kind: attention("ring", None, length, device, kind=kind) for kind in kinds}
        return TokenPositions(*angles(model, torch.arange(length, device=device), dtype), attends)

    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine for every token: `[s, b, 1, e/2]`, or `[s, 1, 1, e/2]` for all sequences alike."""
        if self.positions is None:
            return self.cos, self.sin
        return self.cos[self.positions, 0], self.sin[self.positions, 0]


def frequencies(model: Model, device: torch.device | None = None) -> Tensor:
    """Radians per position of every pair of features, `[e/2]` in float64; low ones stretched as in Llama 3.1."""
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float64, device=device) / model.head_size
    plain = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_length * plain / (2 * math.pi)  # within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: stretched by the factor, 1: left alone
    return plain * (keep + (1 - keep) / scaling.factor)


def angles(model: Model, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[p, 1, 1, e/2]` of the angles at `positions` `[p]`, in float32 or the wider `dtype`."""
    turns = positions[:, None, None, None] * frequencies(model, positions.device)
    wide = torch.promote_types(dtype, torch.float32)
    return turns.cos().to(wide), turns.sin().to(wide)
