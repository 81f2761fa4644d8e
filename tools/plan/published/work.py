"""Work of a step of a published run: the model's sizes, the layout, and the batch. Imports no torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megalite.config.layers import GroupedQuery, Heads, Mixture, Scores, SwiGLU
from megalite.config.schema import DataMode
from megalite.cost.share import Computed, Share
from megalite.plan.parts.attention import GroupedQueryPart
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.parts.part import Passed, Product
from megalite.plan.parts.swiglu import SwiGLUPart

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class TwoMatrices:
    """A feed-forward of two matrices, as GPT-3 has it, for the times of programs that train such models."""

    width: int
    hidden: int

    heads = None

    def products(self, tokens: float, tp: int) -> list[Product]:
        hidden = self.hidden / tp
        return [
            Product(tokens, hidden, self.width, gathered=self.width),
            Product(tokens, self.width, hidden, scattered=True),
        ]

    def passed(self, tp: int) -> Passed:
        return Passed(hidden=self.hidden / tp)


@dataclass(frozen=True)
class Work:
    """Sizes of a decoder, how it is spread over ranks, and what a step trains on.

    gated: the MLP has three matrices instead of two. tied: the output layer uses the embedding's matrix. virtual:
    stages of a pipeline rank. dp: data-parallel ranks. shards: of them, those that zero3 shards over, if not
    all; the others have the same. micro: sequences of a micro-batch. micro_batches: of a step and
    a data-parallel rank. precision: of matrix products. experts: of every layer, which `ep` ranks share out; they may
    be neighbours among those of data, context and tensor parallelism.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = True
    tied: bool = False
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    cp: int = 1
    dp: int = 1
    shards: int | None = None
    mode: DataMode = "zero3"
    micro: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    precision: Literal["bf16", "fp8", "fp32", "fp64"] = "bf16"
    window: int | None = None
    method: Literal["ring", "ulysses", "all_gather"] = "ring"
    experts: Mixture | None = None
    ep: int = 1

    @cached_property
    def share(self) -> Share:
        """Share of a micro-batch that a rank has."""
        window = self.window if self.window is not None and self.window < self.sequence else None
        heads = Heads(self.heads, self.kv_heads, self.head_size, self.head_size, self.head_size, Scores(window))
        feed_forward: Computed = TwoMatrices(self.width, self.ffn)
        if self.experts:
            feed_forward = ExpertsPart(self.width, self.experts)
        elif self.gated:
            feed_forward = SwiGLUPart(self.width, SwiGLU(self.ffn))
        return Share(
            (GroupedQueryPart(self.width, GroupedQuery(heads)), feed_forward),
            self.width,
            self.vocab,
            self.sequence,
            self.tp,
            self.cp,
            self.micro,
            self.recompute,
            self.precision,
            method=self.method,
            ep=self.ep,
        )

    @property
    def element(self) -> int:
        """Bytes of an activation's element, and of a weight's in a matrix product."""
        return self.share.element

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro * self.sequence // self.cp

    @property
    def q(self) -> int:
        return self.heads * self.head_size

    @property
    def k(self) -> int:
        return self.kv_heads * self.head_size

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer's matrices."""
        products = (product for part in self.share.parts for product in part.products(1, 1))
        return round(sum(product.outputs * product.inputs * product.groups for product in products))

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of a layer's experts."""
        return 3 * self.experts.count * self.experts.width * self.width if self.experts else 0

    @property
    def own_parameters(self) -> int:
        """Parameters of a layer's matrices that tensor parallelism splits."""
        return self.layer_parameters - self.expert_parameters

    @property
    def rank_parameters(self) -> float:
        """Parameters of a layer's matrices on a rank, before data-parallel sharding."""
        return self.own_parameters / self.tp + self.expert_parameters / self.ep

    @property
    def layer_flops(self) -> float:
        """Operations of a layer's matrix products for a token, forward."""
        return sum(product.flops for part in self.share.parts for product in part.products(1, 1))

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all ranks."""
        return self.micro * self.micro_batches * self.dp * self.sequence
