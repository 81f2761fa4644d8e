"""Work of a step of a published run: the model's sizes, the layout, and the batch. Imports no torch."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from megalite.config.layers import GroupedQuery, Heads, Latent, Mixture, Scores, SwiGLU
from megalite.config.parallel_schema import DataMode
from megalite.cost.share import Computed, Share
from megalite.plan.parts.attention import GroupedQueryPart
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.parts.latent import LatentPart
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
    a data-parallel rank. rounds: pipelines of a step, one after another, that share these out. precision: of matrix
    products. window: keys of a query, but in every `full_every`-th layer. latent: attention is latent, with these
    figures. experts: of every layer but the first `dense_layers`, which `ep` ranks share out; they may be neighbours
    among those of data, context and tensor parallelism. predicting: layers beyond the last that predict further tokens,
    each with the output layer once more.
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
    rounds: int = 1
    window: int | None = None
    full_every: int = 0
    latent: Latent | None = None
    method: Literal["ring", "ulysses", "all_gather"] = "ring"
    experts: Mixture | None = None
    dense_layers: int = 0
    ep: int = 1
    predicting: int = 0

    @cached_property
    def share(self) -> Share:
        """Share of a micro-batch that a rank has, of the last layer."""
        return self.shares[-1]

    @cached_property
    def shares(self) -> list[Share]:
        """Shares of all layers."""
        window = self.window if self.window is not None and self.window < self.sequence else None
        made = cache(self._share)
        windows = [None if self.full_every and (n + 1) % self.full_every == 0 else window for n in range(self.layers)]
        return [made(each, n >= self.dense_layers) for n, each in enumerate(windows)]

    def _share(self, window: int | None, with_experts: bool) -> Share:
        heads = Heads(self.heads, self.kv_heads, self.head_size, self.head_size, self.head_size, Scores(window))
        attention: Computed = GroupedQueryPart(self.width, GroupedQuery(heads))
        if self.latent:
            attention = LatentPart(self.width, self.latent)
        feed_forward: Computed = TwoMatrices(self.width, self.ffn)
        if self.experts and with_experts:
            feed_forward = ExpertsPart(self.width, self.experts)
        elif self.gated:
            feed_forward = SwiGLUPart(self.width, SwiGLU(self.ffn))
        return Share(
            (attention, feed_forward),
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
        """Parameters of the last layer's matrices."""
        return sum(self.parameters(self.share))

    def parameters(self, share: Share) -> tuple[int, int]:
        """Parameters of the matrices of a layer that tensor parallelism splits, and those of experts."""
        products = [product for part in share.parts for product in part.products(1, 1)]
        own, experts = (
            round(sum(each.outputs * each.inputs * each.groups for each in products if (each.groups > 1) == of_experts))
            for of_experts in (False, True)
        )
        return own, experts

    def rank_parameters(self, share: Share) -> float:
        """Parameters of a layer's matrices on a rank, before data-parallel sharding."""
        own, experts = self.parameters(share)
        return own / self.tp + experts / self.ep

    def forward_flops(self, seen: float) -> float:
        """Operations of all layers for a token, forward. seen: share of earlier and later positions that count."""
        found = 0.0
        for share in self.shares:
            (heads,) = share.heads
            found += sum(product.flops for part in share.parts for product in part.products(1, 1))
            found += 2 * self.sequence * (heads.queries + heads.outputs) * seen
        return found

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all ranks."""
        return self.micro * self.micro_batches * self.dp * self.sequence
