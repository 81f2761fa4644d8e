"""A rank's share of a micro-batch, from which the times of kernels and communication follow. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from megalite.config.attention_kernels import Kernel, Machine, Need, planned_kernel
from megalite.config.layers import Heads, LayerKind
from megalite.config.parallel_schema import TensorParallel
from megalite.config.schema import AttentionKernel, Config
from megalite.plan.model.weights import embedding
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Passed, Product
from megalite.plan.parts.sizes import PRECISION_BYTES, Sizes
from megalite.plan.recompute_modes import Mode


class Computed(Protocol):
    """Interface of a part of a layer that times need; every `plan.parts.part.Part` has it."""

    @property
    def heads(self) -> Heads | None: ...

    def products(self, tokens: float, tp: int) -> list[Product]: ...

    def passed(self, tp: int) -> Passed: ...


@dataclass(frozen=True)
class Share:
    """Layers of one kind, and how much of a micro-batch a rank has.

    parts: of each layer. vocab: with padding. micro: sequences. precision: of matrix products; recipe: of their scales
    in 8 bits. documents: attention stays inside of them. deterministic, attention: as in
    `train.deterministic` and `kernels.attention`. pieces: in which ranks of tp gather and scatter beside products; 0:
    they wait for each collective. fixed: ranks of ep get all of their tokens. predicted: tokens that the head predicts
    at every position. graphed: the host launches whole micro-batches.
    """

    parts: tuple[Computed, ...]
    width: int
    vocab: int
    sequence: int
    tp: int = 1
    cp: int = 1
    micro: int = 1
    recompute: Mode = "none"
    precision: Literal["bf16", "fp8", "fp32", "fp64"] = "bf16"
    method: Literal["ring", "ulysses", "all_gather"] = "ring"
    documents: bool = False
    deterministic: bool = False
    attention: AttentionKernel = "auto"
    recipe: Literal["tensorwise", "rowwise", "mx"] = "tensorwise"
    ep: int = 1
    fixed: bool = False
    pieces: int = 1
    predicted: int = 1
    graphed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens on the rank."""
        return self.micro * self.sequence // self.cp

    @property
    def element(self) -> int:
        """Bytes of an activation's element, and of a weight's in a matrix product."""
        return PRECISION_BYTES.get(self.precision, 2)

    @property
    def outside(self) -> Literal["bf16", "fp32", "fp64"]:
        """The precision of attention and of the output layer, which fp8 leaves in bf16."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def operands(self) -> str:
        """The precision of the matrix products of layers, as a cluster's file names it."""
        return "mxfp8" if self.precision == "fp8" and self.recipe == "mx" else self.precision

    @property
    def heads(self) -> list[Heads]:
        """Heads of each part that has attention."""
        return [part.heads for part in self.parts if part.heads is not None]

    @property
    def passed(self) -> Passed:
        """Elements that kernels between matrix products read or write."""
        found = [part.passed(self.tp) for part in self.parts]
        return Passed(*map(sum, zip(*found, strict=True)))

    def kernel(self, heads: Heads, gpu: Machine) -> Kernel:
        """The kernel of attention with `heads`, by the table."""
        scores, ring = heads.scores, self.cp > 1 and self.method != "ulysses"
        window, capped = scores.window_in(self.sequence) is not None, scores.softcap is not None
        widths = heads.width, heads.value_width
        need = Need(self.outside, ring, self.documents, window, capped, *widths, self.deterministic, scores.sinks)
        return planned_kernel(self.attention, need, gpu)

    def products(self, tokens: float) -> list[Product]:
        """The matrix products of a layer's forward pass, of so many tokens."""
        return [product for part in self.parts for product in part.products(tokens, self.tp)]


def share_of(config: Config, kind: LayerKind, recompute: Mode = "none") -> Share:
    """The share of a rank of `config`, of layers of `kind`."""
    model, parallel = config.model, config.parallel
    return Share(
        parts=Layer(model.width, kind).computed,
        width=model.width,
        vocab=embedding(model).part(parallel.tp)[0] * parallel.tp,
        sequence=model.sequence_length,
        tp=parallel.tp,
        cp=parallel.cp,
        ep=parallel.ep,
        fixed=parallel.fixed_buffers,
        micro=config.batch.micro_size,
        recompute=recompute,
        precision=config.train.precision,
        recipe=config.train.float8_recipe,
        pieces=_pieces(config),
        method=parallel.context.method,
        documents=config.data.mask_documents,
        deterministic=config.train.deterministic,
        attention=config.kernels_by_operation.attention,
        predicted=1 + model.depth,
        graphed=config.train.cuda_graph,
    )


def _pieces(config: Config) -> int:
    """`Share.pieces`. Products that are fused with collectives are taken to hide as much: nobody has timed them."""
    if config.train.compile:  # the compiler's graphs wait at once
        return 0
    if config.fuses_over_tp:
        config = replace(config, parallel=replace(config.parallel, tensor=TensorParallel()))
    return Sizes(config).pieces
