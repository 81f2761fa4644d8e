"""Sizes of a micro-batch's tensors on one rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megalite.config.layout import FLOAT8_MULTIPLES
from megalite.config.schema import Config
from megalite.plan.parts.pieces import pieces
from megalite.plan.parts.roles import RoleKind
from megalite.plan.parts.transfers import Transfers, over

PRECISION_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}  # by train.dtype


@dataclass(frozen=True)
class Sizes:
    """Sizes of a configuration's activations on one rank; `parallel.dp_shard` and `batch.micro` must be numbers."""

    config: Config

    @cached_property
    def t(self) -> int:
        """Ranks of tensor parallelism."""
        return self.config.parallel.tp

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return self.config.batch.micro_size * self.config.model.sequence_length // self.config.parallel.cp

    @cached_property
    def predicted(self) -> int:
        """Tokens that the head predicts at every position."""
        return 1 + self.config.model.depth

    @cached_property
    def w(self) -> int:
        """Bytes of an activation, of a weight in a product, and of its gradient."""
        return PRECISION_BYTES[self.config.train.dtype]

    @cached_property
    def z(self) -> int:
        """Bytes of a statistic or of a sum."""
        return max(self.w, 4)

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream on one rank, the tensor that stages send to each other."""
        return self.split(self.config.model.width)

    @cached_property
    def statistic(self) -> int:
        """Bytes of a statistic: one number for each position on a rank."""
        return self.tokens // self.t * self.z

    @cached_property
    def gathered(self) -> int:
        """Bytes of the residual stream gathered over tp; 0 without tp, which needs no copy."""
        return self.stream * self.t if self.t > 1 else 0

    def split(self, features: int) -> int:
        """Bytes of an activation of so many features a token, which are split over tp."""
        return self.tokens * self.w * features // self.t

    @property
    def norm(self) -> int:
        """Bytes in backward of a norm: a gradient, and three temporaries in float32 or wider."""
        return self.stream + 3 * self.stream * self.z // self.w

    def linear(self, grads: int, trained: bool) -> int:
        """Bytes in backward of linear layers of one input: `grads` of outputs, the gathered input, its gradient.

        trained: some layer is, so that its weight's gradient needs the input.
        """
        return grads + self.stream + (self.gathered * (1 + trained) if self.gathered else 0)

    def in_8_bits(self, weights: Iterable[tuple[str, Any]], into_stream: bool) -> bool:
        """Return whether the products of a part's matrices are in 8 bits: of those into the stream, or of all others.

        They share an input, and all sizes of operands must be multiples of `multiple`. Experts and their router are in
        16 bits.
        """
        if self.config.train.precision != "fp8":
            return False
        matrices = [weight for _, weight in weights if weight.role.kind is RoleKind.MATRIX]
        if any(weight.role.of_expert for weight in matrices):
            return False
        shapes = (weight.part(self.t) for weight in matrices if weight.role.into_stream == into_stream)
        return not any(size % self.multiple for shape in shapes for size in shape)

    @cached_property
    def multiple(self) -> int:
        """Sizes of operands in 8 bits are multiples of it, on every rank."""
        return FLOAT8_MULTIPLES[self.config.train.float8_recipe]

    def narrow(self, size: int, rows: int) -> int:
        """Bytes of an operand in 8 bits with its scales, of `rows` rows, which takes `size` bytes as an activation.

        A scale of a whole tensor counts as nothing, that of a row takes 4 bytes, and that of a block 1.
        """
        elements = size // self.w
        scales = {"tensorwise": 0, "rowwise": 4 * rows, "mx": elements // FLOAT8_MULTIPLES["mx"]}
        return elements + scales[self.config.train.float8_recipe]

    @cached_property
    def pieces(self) -> int:
        """The pieces in which ranks of tp gather the input of a part in forward, scatter its output, and gather its
        gradient."""
        return self.in_pieces(self.gathered)

    def in_pieces(self, size: int) -> int:
        """The pieces of a tensor of `size` bytes over all ranks of tp. PyTorch's products alone are computed in pieces,
        where nothing is compiled and none is fused with its collective."""
        config = self.config
        if not config.plain_products or config.train.compile or config.fuses_over_tp:
            return 1
        positions = self.tokens if config.joins_samples else config.model.sequence_length // config.parallel.cp
        return pieces(positions // config.parallel.tp, size)

    @cached_property
    def shared_buffer(self) -> int:
        """Bytes of the memory through which ranks of tp exchange what fused products take and make.

        Two parts of an output: peers fetch one while the next is computed.
        """
        return 2 * self.stream if self.config.fuses_over_tp else 0

    def narrow_over_tp(self, purpose: str) -> Transfers:
        """Gathers over tp of the residual stream in 8 bits and of its scales, of which ranks know that of a tensor."""
        size = self.gathered // self.w
        found, recipe = over("tp", "all_gather", size, 1, purpose), self.config.train.float8_recipe
        if recipe != "tensorwise":
            each = 4 if recipe == "rowwise" else 1
            found += over(
                "tp", "all_gather", self.narrow(self.gathered, self.tokens) - size, each, f"{purpose}: scales"
            )
        return found if size else Transfers()

    def over_tp(self, kind: str, purpose: str, n: int = 1) -> Transfers:
        """A collective over tp of the residual stream, in `n` pieces."""
        return over("tp", kind, self.gathered // n, self.w, purpose, n)
