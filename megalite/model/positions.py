"""Positions of tokens: the angles of rotary position embedding, and which tokens attend to which."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.config.layers import Rotation, Scores, layer_kinds, rotations, yarn_factor
from megalite.config.model_schema import Model, RopeScaling
from megalite.model.router import Losses
from megalite.parallel.context import Attention, attention

Angles = tuple[Tensor, Tensor]  # cosine and sine, p 1 1 e/2


@dataclass(frozen=True)
class TokenPositions:
    """Angles of the tokens of a micro-batch on this rank, and the attention between them, as stages need them."""

    tables: Mapping[Rotation, Angles]  # one row per token of a sequence, or one per position if `positions` is given
    attention: Mapping[Scores, Attention]  # for every kind of attention that layers here have
    positions: Tensor | None = None  # s b: every token's row of the tables; None: token i has row i
    numbers: Tensor | None = field(default=None, kw_only=True)  # s b: of tokens in the run, where layers drop features
    losses: Losses = field(default=Losses(), kw_only=True)  # parameters of losses in layers with experts

    @staticmethod
    def whole(model: Model, length: int, device: torch.device, dtype: torch.dtype) -> "TokenPositions":
        """Positions in sequences of one document each, of which this rank holds the first `length` tokens."""
        kinds = {kind.attention.heads.scores for kind in layer_kinds(model)}
        attends = {kind: attention("ring", None, length, device, kind=kind) for kind in kinds}
        return TokenPositions(tables(model, torch.arange(length, device=device), dtype, length), attends)

    def attend(self, layer: int, kind: Scores) -> Attention:
        """The attention of layer number `layer`, which is of this kind."""
        return self.attention[kind]

    def angles(self, rotation: Rotation) -> Angles:
        """Cosine and sine for every token: `[s, b, 1, e/2]`, or `[s, 1, 1, e/2]` if all sequences share them."""
        cos, sin = self.tables[rotation]
        if self.positions is None:
            return cos, sin
        return cos[self.positions, 0], sin[self.positions, 0]


def frequencies(rotation: Rotation, length: int, device: torch.device | None = None) -> Tensor:
    """Radians per position of every pair of features, `[e/2]` in float64, in a sequence of `length` tokens.

    Pairs beyond the rotary width have 0: they do not turn.

    Scaling divides frequencies by its factor: kind linear all of them (arXiv 2306.15595), llama3 (arXiv 2407.21783,
    §3.4.1) and yarn (arXiv 2309.00071, §3.2) low ones fully and high ones not at all. Between the two, llama3
    interpolates by rotations within the original context, and yarn by the number of the pair. longrope divides every
    pair's by a number of its own (arXiv 2402.13753), and dynamic raises the base, so that the slowest pair alone is
    divided fully (NTK-aware scaling); with these two they depend on `length`, as in transformers.
    """
    size, scaling = rotation.rotary_width, rotation.rope.scaling
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    plain = rotation.rope.base**-exponents
    if scaling is not None:
        plain = _scaled(plain, exponents, scaling, rotation, length)
    return F.pad(plain, (0, (rotation.width - size) // 2))


def _scaled(plain: Tensor, exponents: Tensor, scaling: RopeScaling, rotation: Rotation, length: int) -> Tensor:
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "longrope":
            factors = scaling.long_factors if length > scaling.original_length else scaling.short_factors
            return plain / plain.new_tensor(factors)
        case "dynamic":
            beyond = max(length / scaling.original_length - 1, 0)
            size = rotation.rotary_width
            return plain * (1 + scaling.factor * beyond) ** -(exponents * size / (size - 2))
        case "llama3":
            turns = scaling.original_length * plain / (2 * math.pi)  # rotations within the original context
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divided by the factor, 1: unchanged
        case "yarn":
            first, last = _yarn_pairs(scaling, rotation)
            pairs = torch.arange(len(plain), dtype=torch.float64, device=plain.device)
            keep = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return plain * (keep + (1 - keep) / scaling.factor)


def least_alike(scaling: RopeScaling | None, length: int) -> int:
    """The length of the shortest sequences that have the same frequencies as those of `length` tokens."""
    if scaling is None or scaling.kind not in ("longrope", "dynamic") or length <= scaling.original_length:
        return 0
    return scaling.original_length + 1 if scaling.kind == "longrope" else length


def _yarn_pairs(scaling: RopeScaling, rotation: Rotation) -> tuple[float, float]:
    """The last pair that keeps its frequency, and the first whose frequency is divided by the whole factor."""

    def pair(rotations: float) -> float:
        """The pair, of a head of any width, that rotates so often within the original context."""
        wavelength = scaling.original_length / (2 * math.pi * rotations)
        return rotation.rotary_width * math.log(wavelength) / (2 * math.log(rotation.rope.base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotation.rotary_width - 1)
    return first, last if last != first else last + 0.001  # as transformers avoids a division by 0


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of cosines and sines, which sharpens attention to more tokens (YaRN, §3.4; LongRoPE)."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        if scaling.mscale and scaling.mscale_all_dim:
            return yarn_factor(scaling, scaling.mscale) / yarn_factor(scaling, scaling.mscale_all_dim)
        return yarn_factor(scaling, 1)
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))


def angles(rotation: Rotation, positions: Tensor, dtype: torch.dtype, length: int) -> Angles:
    """Cosine and sine `[p, 1, 1, e/2]` of the angles at `positions` `[p]`, in float32 or the wider `dtype`.

    length: tokens of the sequences that these are positions of, on all ranks together. Cosine and
    sine of pairs that turn are multiplied by the attention factor of RoPE scaling.
    """
    turns = positions[:, None, None, None] * frequencies(rotation, length, positions.device)
    wide, factor = torch.promote_types(dtype, torch.float32), attention_factor(rotation.rope.scaling)
    cos, sin = turns.cos(), turns.sin()
    if factor != 1:
        cos[..., : rotation.rotary_width // 2] *= factor
        sin *= factor
    return cos.to(wide), sin.to(wide)


def tables(model: Model, positions: Tensor, dtype: torch.dtype, length: int) -> dict[Rotation, Angles]:
    """`angles` for every rotation that layers of `model` have."""
    return {rotation: angles(rotation, positions, dtype, length) for rotation in rotations(model)}
