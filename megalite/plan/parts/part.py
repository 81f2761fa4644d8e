"""Interface of a part of a layer for plans: one value for each kind of part answers all of it. Imports no torch.

A part has a module of its own in `megalite.model`. Sizes and FLOPs, the memory walk, traffic, the times of the planner
and the module read the same value, so a tensor of a part is described in one place.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, NamedTuple, Protocol

from megalite.config.layers import Heads
from megalite.config.layout import FOUR_BIT_BLOCK, shard_dim, vocabulary_rows
from megalite.config.model_schema import BaseForm
from megalite.plan.parts.roles import SPLIT, Role, Side
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.transfers import Transfers

FOUR_BIT_BLOCK_BYTES = 36  # see `megalite_kernels.nf4`
FOUR_BIT_BYTES = FOUR_BIT_BLOCK_BYTES / FOUR_BIT_BLOCK  # bytes of a value


@dataclass(frozen=True)
class Weight:
    """A parameter of the model: a vector, a matrix, or a stack of matrices, which are its last two dimensions.

    trained: False for a weight that training leaves as it is. It has no gradient and no optimizer states; gradients of
    inputs pass through it. used: matrices of a stack that compute a token; None: all. four_bits: it is kept so
    (`megalite_kernels.nf4`), and made wide where it is used.
    """

    shape: tuple[int, ...]
    role: Role
    trained: bool = True
    used: int | None = None
    four_bits: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def active(self) -> int:
        """Elements that compute a token."""
        return self.elements if self.used is None else self.used * prod(self.shape[1:])

    def part(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """The shape of a rank's part, with the rows of padding that a vocabulary has.

        tp: ranks of tensor parallelism. ep: ranks that share out the experts of a layer.
        """
        found = list(self.shape)
        if self.role.of_expert:
            found[0] //= ep
        elif self.role.split:
            found[self.split] = self.share(self.split, tp)
        return tuple(found)

    def share(self, dim: int, ranks: int) -> int:
        """The size of a dimension on each of so many `ranks` that split it, with the padding of a vocabulary."""
        of_vocabulary = dim == 0 and self.role.outputs is Side.VOCABULARY
        return vocabulary_rows(self.shape[dim], ranks) if of_vocabulary else self.shape[dim] // ranks

    @property
    def split(self) -> int:
        """The dimension that tensor parallelism splits, if any: rows where it divides outputs, else columns."""
        return max(len(self.shape) - 2, 0) + (self.role.outputs not in SPLIT)

    def shard_dim(self, shards: int, ep: int = 1) -> int:
        """The dimension along which FSDP2 shards it over so many ranks: the first, which is padded, or another of
        experts. ep: as for `part`."""
        return (shard_dim(self.part(1, ep), shards) or 0) if self.role.of_expert else 0

    def recut(self, shards: int, ep: int = 1) -> int:
        """Elements of a rank's part that FSDP2 copies once more, as it shards them along another dimension than the
        first; 0 else. ep: as for `part`."""
        return prod(self.part(1, ep)) if self.shard_dim(shards, ep) else 0

    def padded(self, shards: int, tp: int, ep: int = 1) -> int:
        """Elements of a rank's part, as `shards` ranks exchange it. tp, ep: as for `part`."""
        sizes, dim = list(self.part(tp, ep)), self.shard_dim(shards, ep)
        sizes[dim] = -(-sizes[dim] // shards) * shards
        return prod(sizes)

    def bytes(self, elements: int, each: int) -> int:
        """Bytes of so many elements, of `each` bytes unless they are in four bits."""
        return in_four_bits(elements) if self.four_bits else each * elements

    def gradient(self, tp: int, ep: int = 1) -> int:
        """Elements of the gradient on a rank, 0 if there is none. tp, ep: as for `part`."""
        return prod(self.part(tp, ep)) if self.trained else 0


def in_four_bits(elements: int) -> int:
    """Bytes of so many elements, which are whole blocks."""
    return elements // FOUR_BIT_BLOCK * FOUR_BIT_BLOCK_BYTES


class Weighted(ABC):
    """A part with weights that are trained, or, with adapters beside them, are kept as `base` says.

    moments: of backward, by the layers whose weights' gradients they make.
    """

    base: BaseForm | None
    moments: ClassVar[Mapping[str, str]]

    @abstractmethod
    def described(self) -> Iterator[tuple[str, Weight]]:
        """All weights, each with its name inside of the part, in the order of forward."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """The weights that are `described`, as they are trained."""
        for name, weight in self.described():
            if self.base is None:
                yield name, weight
            else:
                yield name, replace(weight, trained=False, four_bits=self.base == "nf4" and weight.role.fits_four_bits)

    def moment_of(self, name: str) -> str:
        """The moment of backward that makes the gradient of a matrix."""
        return self.moments[name.removesuffix(".weight")]


class Product(NamedTuple):
    """A matrix product with a weight on one rank: `rows` of `inputs` features to as many of `outputs` features.

    groups: weights among which the rows are divided, evenly on average. gathered: features of a token that ranks of
    tensor parallelism gather for it. scattered: they sum its outputs, and each takes its part of the sequence. trained:
    its weight has a gradient. four_bits: it is kept in them, and made wide before the product. scaled: inputs of a
    matrix whose output this is added to, before that is scaled by norms of the matrix's rows; 0: it is not.
    beside_rows: it is computed while rows of tokens are on their way to other ranks' experts, or back.
    """

    rows: float
    outputs: float
    inputs: float
    groups: int = 1
    gathered: int = 0
    scattered: bool = False
    trained: bool = True
    four_bits: bool = False
    scaled: float = 0
    beside_rows: bool = False

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.outputs * self.inputs


class Passed(NamedTuple):
    """Elements for each token and rank that kernels between matrix products read or write, by what they are.

    hidden: between the products of a feed-forward. heads: queries, keys and values. routed: tokens that are brought to
    their experts, and their rows, one for each. rows: of these, the rows. active: experts of a token.
    """

    hidden: float = 0
    heads: float = 0
    routed: float = 0
    rows: float = 0
    active: int = 0


@dataclass(frozen=True)
class Kept:
    """A tensor that a forward pass keeps for backward, or several tensors that are released together."""

    component: str
    bytes: int
    until: str  # the moment of backward that uses it last
    for_weights: str = ""  # the moment whose weight gradients need the tensor; a split backward keeps it until W
    cheap: bool = False  # selective recompute makes the tensor again when backward needs it
    given: bool = False  # the input of a layer, which full recompute keeps
    remembered: bool = False  # a choice: it stays on the device, and full recompute does not make it again
    of_arrivals: bool = False  # made of rows that other ranks have sent
    recipe: bool = False  # cheap tensors alone are made of it: selective recompute alone keeps it


@dataclass(frozen=True)
class Moment:
    """A place in the backward pass where memory may peak."""

    name: str
    temporaries: int
    weights: int = 0  # bytes of weight gradients made here; they stay until the unit has all of its weight gradients
    largest: int = 0  # bytes of the largest of these gradients, if each is added to a sum before the next is made
    put_off: int = 0  # bytes of output gradients that a split backward keeps until W
    of_stream: bool = False  # these are the gradient of the residual stream itself
    held: int = 0  # bytes of `temporaries` that a moment before has put off, where gradients of weights are
    again: int = 0  # temporaries of W when it makes the weight gradients that were put off
    # Bytes of new float32 sums in place of `weights`, where weights have copies; 0: forward keeps the sum already.
    summed: int | None = None
    adds: bool = False  # ends with another gradient of the residual stream, to which the part has added
    pauses: int = 0  # times that a pass waits for rows of other ranks here, and one beside it has its turn
    # Only in layers whose tensors are "remade" by full recompute, or "kept" on the device; empty: in all.
    where: Literal["", "remade", "kept"] = ""


class Pause(NamedTuple):
    """A place in the forward pass where it waits for other ranks, and a pass beside it has its turn.

    temporaries: bytes that it holds then. arrived: whether the part has made the tensors that are `of_arrivals`.
    """

    temporaries: int
    arrived: bool


class Part(Protocol):
    """Attention or the feed-forward of a layer. It takes and returns the residual stream, `[s/t, b, d]` on a rank."""

    @property
    def name(self) -> str:
        """The name of the part's module in a layer, with which its weights begin; also its component in tables."""

    @property
    def takes(self) -> str:
        """The moment of backward that uses the part's input last, for the gradients of weights too."""

    @property
    def heads(self) -> Heads | None:
        """The heads of attention; None in a part without."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """All weights, each with its name inside of the part, in the order of forward."""

    def products(self, tokens: float, tp: int) -> list[Product]:
        """The matrix products of a forward pass on one of `tp` ranks."""

    def passed(self, tp: int) -> Passed:
        """Elements that kernels between these products read or write."""

    def kept(self, sizes: Sizes) -> tuple[Kept, ...]:
        """Tensors that a forward pass keeps for backward, the part's input aside."""

    def forward(self, sizes: Sizes, passing: Sequence[Kept]) -> int:
        """Temporaries when a forward pass makes its output, but for two as large as that.

        passing: tensors of the part that backward needs, but that forward does not keep on the device.
        """

    def pauses(self, sizes: Sizes) -> tuple[Pause, ...]:
        """Places in the forward pass where others have their turn, in order."""

    def backward(self, sizes: Sizes, own: int) -> tuple[Moment, ...]:
        """The moments of backward, in order, with what they take beside the gradient of the residual stream.

        own: bytes of the gradient of what the part returns; 0 where that is the gradient of the residual stream.
        """

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str) -> Transfers:
        """Transfers of a forward pass, its output aside. cp: the rank's place in its group of context parallelism."""

    def output_transfers(self, sizes: Sizes, phase: str) -> Transfers:
        """Last transfers of a forward pass, which return its output."""

    def backward_transfers(self, sizes: Sizes, cp: int) -> Transfers:
        """Transfers of backward, but for the gradients of weights."""

    def weight_transfers(self, sizes: Sizes) -> Transfers:
        """Transfers for the gradients of weights, in backward or in W."""
