"""Bytes that one rank keeps of a micro-batch for backward, and bytes that backward needs beside them.

A stage consists of the parts that FSDP2 gathers one by one: the embedding, every layer, the head.

    h  width                    T  tokens of a micro-batch on a rank, b·s/c
    q  heads · head size        t  tp
    k  kv heads · head size     w  bytes of an activation, a compute weight and its gradient: 2, 4 or 8
    f  ffn                      z  bytes of a statistic (1/rms, log-sum-exp): 4 or 8
    v  vocabulary

    kept of a layer                     norms                 attention             MLP
      inputs of the norms, 1/rms        2·(hw + z)·T/t
      norm outputs                                            hwT/t                 hwT/t
      queries, keys, values, output                           2(q + k)·wT/t
      log-sum-exp                                             heads·zT/t
      gate, up, product                                                             3fwT/t

The sum is eq. 4 of Korthikanti et al. 2022 (arXiv 2205.05198), without the tensors that fused kernels need not keep.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megalite.config.layers import AttentionKind, LayerKind, layer_kinds
from megalite.config.schema import Config
from megalite.plan.attention import AttentionMemory
from megalite.plan.parts import Kept, Moment, Part, Weights
from megalite.plan.recompute_modes import Mode
from megalite.plan.size import Parameters, layer_parameters
from megalite.plan.states import state_names
from megalite.plan.weights import Weight, embedding, final_norm, head, layer_weights, part_of

BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}  # by train.precision
TOKEN = 8  # bytes of a token id
ROWS = 128  # rows that cross_entropy handles at a time
FEWEST, TILE = 4096, 128  # tokens: the lowest limit for a chunk of the head, and the unit that chunks are multiples of
CLASSES = 1024  # classes whose logits the head widens at a time, to sum the gradient of its weight
OFFLOAD_SHARE = 32  # a tensor below 1/32 of a layer's input, such as a statistic of its rows, is not worth a copy


def chunk_tokens(tokens: int, width: int, itemsize: int, ranks: int) -> int:
    """How many tokens the head makes logits of at a time; `megalite_kernels.linear_cross_entropy` has the reasons."""
    wide, buffers = max(itemsize, 4), 2 if ranks > 1 else 1
    most = max(width // buffers, FEWEST)
    if tokens * itemsize <= buffers * most * itemsize + width * wide:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // most))
    return min(-(-even // TILE) * TILE, most)


@dataclass(frozen=True)
class Activations:
    """Sizes of a configuration's activations on one rank."""

    config: Config

    def embedding(self, with_head: bool) -> Part:
        """The embedding's table and its look-up. with_head: the same stage has the head, which may use the table."""
        ids = (TOKEN + 1) * self.tokens if self.t > 1 else 0
        # The gathered gradient is copied to mask other ranks' tokens. Only the copy is left for the weight's gradient.
        masked = (Moment("mask", 2 * self.gathered),) if self.t > 1 else ()
        moments = (*masked, Moment("lookup", self.gathered or self.stream, self.w * self._matrix))
        tied = self.config.model.tie_embeddings and with_head
        kept = (Kept("embedding", ids, "lookup"),)
        weights = self._weights([embedding(self.config.model)])
        return Part("embedding", weights, self._matrix, kept, 2 * self.gathered, moments, with_stage=tied)

    def tied_copy(self) -> Part:
        """The last stage's copy of the embedding, which the head uses."""
        weights = self._weights([head(self.config.model)])
        return Part("embedding", weights, self._matrix, (), 0, (), with_stage=True, copy=True)

    def layer(self, kind: LayerKind, mode: Mode) -> Part:
        """A layer of `kind` that recomputes as `mode` says."""
        if (kind, mode) not in self._layers:
            self._layers[kind, mode] = self._layer(kind, mode)
        return self._layers[kind, mode]

    @cached_property
    def _layers(self) -> dict[tuple[LayerKind, Mode], Part]:
        """Layers that were asked for."""
        return {}

    def _layer(self, kind: LayerKind, mode: Mode) -> Part:
        everything = self._layer_kept(kind)
        remade = tuple(kept for kept in everything if not kept.given) if mode == "full" else ()
        cheap = tuple(kept for kept in everything if kept.cheap) if mode == "selective" else ()
        left = [kept for kept in everything if kept not in (*remade, *cheap)]
        least = self.stream // OFFLOAD_SHARE if self.config.train.offload_activations else math.inf
        offloaded = tuple(kept for kept in left if kept.bytes >= least)
        passing = (*remade, *cheap, *offloaded)
        return Part(
            "layer",
            self._weights(weight for _, weight in layer_weights(self.config.model, kind)),
            newest=self._down(kind),
            kept=tuple(kept for kept in left if kept.bytes < least),
            forward=2 * self.stream + self.gathered + sum(x.bytes for x in passing if x.component == "mlp"),
            backward=self._layer_backward(kind),
            remade=remade,
            cheap=cheap,
            offloaded=offloaded,
            puts_off=True,
        )

    def layer_bytes(self, kind: LayerKind, mode: Mode) -> int:
        """Bytes that a layer keeps from forward to backward, on the device and in host memory."""
        part = self.layer(kind, mode)
        return sum(kept.bytes for kept in (*part.kept, *part.offloaded))

    def outside(self, stages: int) -> dict[int, int]:
        """By stage: bytes that the embedding and the head keep of a micro-batch; stages with neither are left out."""
        ends = ((0, self.embedding(with_head=stages == 1)), (stages - 1, self.head()))
        found: Counter[int] = Counter()
        for stage, part in ends:
            found[stage] += sum(kept.bytes for kept in part.kept)
        return found

    def head(self) -> Part:
        """The final norm, the output layer and the loss. The weight of a tied output layer is in the embedding."""
        model, tied, narrow = self.config.model, self.config.model.tie_embeddings, self.w < self.z
        columns = self._columns
        chunk, several = self._chunk, self.chunks_head
        logits, inputs = chunk * columns * self.w, self.gathered or self.stream
        block = 2 * min(ROWS, chunk) * columns * self.z if narrow else 0  # a block lives until the next one is made
        copies = chunk * (min(CLASSES, columns) + model.width) * self.z if narrow and several else 0
        kept = [
            Kept("norms", self.stream + self.statistic, "norm"),
            Kept("head", inputs + logits + self.z * chunk, "output"),
        ]
        if several:  # the gradient of the inputs, and the summed gradient of the weight
            kept.append(Kept("head", inputs + self.z * self._matrix, "output"))
        backward = (
            Moment("loss", block),
            Moment("output", copies if several else inputs, self.w * self._matrix),
            Moment("norm", self._norm()),
        )
        forward = max(block, copies) + (logits if several and self.t > 1 else 0)
        weights = self._weights([final_norm(model), *([] if tied else [head(model)])])
        return Part("head", weights, model.width if tied else self._matrix, tuple(kept), forward, backward)

    @property
    def chunks_head(self) -> bool:
        """Whether the head makes logits in several chunks; it then makes its gradients in F."""
        return self._chunk < self.tokens

    @property
    def _chunk(self) -> int:
        """Tokens that the head makes logits of at a time."""
        return min(chunk_tokens(self.tokens, self.config.model.width, self.w, self.t), self.tokens)

    @property
    def angles(self) -> int:
        """Bytes of cosines and sines for a step: of the rank's positions, or of all if documents restart positions."""
        model, resets = self.config.model, self.config.data.reset_positions
        return model.sequence_length // (1 if resets else self.config.parallel.cp) * model.head_size * self.z

    @cached_property
    def turns(self) -> int:
        """Bytes of cosines and sines that a stage looks up for a micro-batch; 0 unless documents restart positions."""
        return self.tokens * self.config.model.head_size * self.z if self.config.data.reset_positions else 0

    @property
    def inputs(self) -> int:
        """Bytes of a micro-batch's samples, and of the tokens, targets and positions that are made of the samples."""
        made = 3 if self.config.data.reset_positions else 2
        return TOKEN * (self.config.batch.micro_size * (self.config.model.sequence_length + 1) + made * self.tokens)

    @cached_property
    def t(self) -> int:
        return self.config.parallel.tp

    @cached_property
    def tokens(self) -> int:
        return self.config.batch.micro_size * self.config.model.sequence_length // self.config.parallel.cp

    @cached_property
    def w(self) -> int:
        return BYTES[self.config.train.precision]

    @cached_property
    def z(self) -> int:
        return max(self.w, 4)

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream on one rank, the tensor that stages send to each other."""
        return self.tokens * self.config.model.width // self.t * self.w

    @cached_property
    def statistic(self) -> int:
        """Bytes of a statistic: one number for each position on a rank."""
        return self.tokens // self.t * self.z

    @cached_property
    def gathered(self) -> int:
        """Bytes of the residual stream gathered over tp; 0 without tp, which needs no copy."""
        return self.stream * self.t if self.t > 1 else 0

    def _weights(self, weights: Iterable[Weight]) -> Weights:
        """Parameters and optimizer states of `weights` on this rank, which has a part of those that tp splits."""

        def elements(weight: Weight) -> int:
            return math.prod(part_of(weight, self.t))

        def states(weight: Weight) -> int:
            return len(state_names(self.config.optim, weight.role)) * elements(weight)

        several = list(weights)
        return Weights(Parameters.of(several, elements), Parameters.of(several, states))

    @property
    def _columns(self) -> int:
        """Tokens of the vocabulary on one rank, with padding."""
        return part_of(embedding(self.config.model), self.t)[0]

    @property
    def _matrix(self) -> int:
        """Elements of the embedding, or of the head, on one rank."""
        return self._columns * self.config.model.width

    def _down(self, kind: LayerKind) -> int:
        """Elements of the last matrix of a layer, on one rank."""
        return self.config.model.width * kind.feed_forward.width // self.t

    def _heads(self) -> tuple[int, int]:
        """Bytes of an activation of width q, and of one of width k, on one rank."""
        model, one = self.config.model, self.tokens * self.w
        return one * model.heads * model.head_size // self.t, one * model.kv_heads * model.head_size // self.t

    def _attention(self, kind: AttentionKind) -> AttentionMemory:
        return AttentionMemory(self.config, kind, *self._heads(), self.w, self.z)

    @property
    def repeats(self) -> bool:
        """Whether attention of any layer repeats keys and values for every query head."""
        return any(self._attention(kind.attention).repeats for kind in set(layer_kinds(self.config.model)))

    def _hidden(self, kind: LayerKind) -> int:
        """Bytes of an activation of width f, on one rank."""
        return self.tokens * self.w * kind.feed_forward.width // self.t

    def _layer_kept(self, kind: LayerKind) -> tuple[Kept, ...]:
        """The tensors that a layer without recompute keeps for backward."""
        model = self.config.model
        (q, k), f = self._heads(), self._hidden(kind)
        of_head = self.tokens * self.z // self.t  # bytes per head of the model: one number per position, split over tp
        post = model.norm == "post"  # then projections take the layer's input as it is, and the MLP the sum after them
        found = [
            Kept("attention", self.stream, "projections", "projections", cheap=not post, given=post),
            *self._attention(kind.attention).kept(),
            Kept("attention", model.heads * of_head, "attention"),
            Kept("norms", self.stream, "attention norm", given=not post),
            Kept("norms", self.statistic, "attention norm"),
            Kept("mlp", self.stream, "gate and up", for_weights="gate and up", cheap=not post),
            Kept("mlp", f, "swiglu"),
            Kept("mlp", f, "swiglu"),
            Kept("mlp", f, "down", for_weights="down", cheap=True),
            Kept("norms", self.stream, "mlp norm"),
            Kept("norms", self.statistic, "mlp norm"),
        ]
        for width, heads in ((q, model.heads), (k, model.kv_heads)) if model.qk_norm else ():
            inverse = heads * of_head if model.qk_norm_width == "head" else self.tokens * self.z
            found += [Kept("norms", width, "rope"), Kept("norms", inverse, "rope")]
        return tuple(found)

    def _layer_backward(self, kind: LayerKind) -> tuple[Moment, ...]:
        """The moments of a layer's backward. The gradient of the residual stream is held in all of them."""
        model, weights, t, w = self.config.model, layer_parameters(self.config.model, kind), self.t, self.w
        (q, k), f = self._heads(), self._hidden(kind)
        down = w * self._down(kind)
        output = w * model.width * model.heads * model.head_size // t
        stream, gathered = self.stream, self.gathered or self.stream
        post = model.norm == "post"
        own = stream if post else 0  # the gradient of what attention or MLP return, which is else that of the stream
        mlp = (
            Moment("down", stream + max(own, self.gathered) + f, down, put_off=gathered),
            Moment("swiglu", stream + 3 * f),
            Moment("gate and up", stream + self._linear(2 * f), w * weights.mlp // t - down, 2 * f, self.gathered),
        )
        attention = (
            Moment("output", stream + max(own, self.gathered) + q, output, put_off=gathered),
            Moment("attention", stream + q + self._attention(kind.attention).backward),
            Moment("rope", stream + q * (2 + self.z // w) + 2 * k),
            Moment(
                "projections",
                stream + self._linear(q + 2 * k),
                w * weights.attention // t - output,
                q + 2 * k,
                self.gathered,
            ),
        )
        given = 0 if post else stream  # a gradient beside that of the stream
        of_mlp, of_attention = (Moment(name, given + self._norm()) for name in ("mlp norm", "attention norm"))
        return (of_mlp, *mlp, of_attention, *attention) if post else (*mlp, of_mlp, *attention, of_attention)

    def _linear(self, grads: int) -> int:
        """Bytes in backward of linear layers of one input: `grads` of outputs, the gathered input, its gradient."""
        return grads + (2 * self.gathered + self.stream if self.gathered else self.stream)

    def _norm(self) -> int:
        """Bytes in backward of a norm: a gradient, and three temporaries in float32 or wider."""
        return self.stream + 3 * self.stream * self.z // self.w
