"""Bytes that one rank keeps of a micro-batch for backward, and bytes that backward needs beside them.

A stage consists of the units that FSDP2 gathers one by one: the embedding, every layer, the head. The parts of a layer
tell what it keeps (`plan.parts`). With the inputs of its norms and 1/rms, 2·(hw + z)·T/t, that is eq. 4 of Korthikanti
et al. 2022 (arXiv 2205.05198), without the tensors that fused kernels need not keep.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.config.layers import LayerKind, layer_kinds, rotations
from megalite.plan.model.optimizer_states import host_copies, state_names
from megalite.plan.model.size import Parameters
from megalite.plan.model.weights import embedding, embedding_weights, head, head_weights
from megalite.plan.parts.attention_memory import AttentionMemory
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Kept, Moment, Part, Weight
from megalite.plan.parts.roles import RoleKind
from megalite.plan.parts.sizes import Sizes
from megalite.plan.recompute_modes import Mode
from megalite.plan.units import FURTHER, Unit, Weights

ID_BYTES = 8  # bytes of a token's id
ROWS = 128  # rows that cross_entropy handles at a time
MIN_CHUNK_TOKENS, TILE = 4096, 128  # the lowest limit for a chunk of the head; chunks are multiples of TILE tokens
OFFLOAD_SHARE = 32  # a tensor below 1/32 of a layer's input, such as a statistic of its rows, is not worth a copy


def chunk_tokens(tokens: int, width: int, itemsize: int, ranks: int) -> int:
    """Tokens that the head makes logits of at a time; `megalite_kernels.linear_cross_entropy` has the reasons."""
    wide, buffers = max(itemsize, 4), 2 if ranks > 1 else 1
    most = max(width // buffers, MIN_CHUNK_TOKENS)
    if tokens * itemsize <= buffers * most * itemsize + width * wide:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // most))
    return min(-(-even // TILE) * TILE, most)


@dataclass(frozen=True)
class Activations(Sizes):
    """Sizes of a configuration's activations on one rank, and the units that keep them."""

    def embedding(self, with_head: bool) -> Unit:
        """The embedding's table and its look-up. with_head: the same stage has the head, and may use it again."""
        table, *factors = embedding_weights(self.config.model).values()
        ids, made = (ID_BYTES + 1) * self.tokens if self.t > 1 else 0, table.gradient(self.t)
        # The gathered gradient is copied to mask other ranks' tokens. Only the copy is left for the weight's gradient.
        masked = (Moment("mask", 2 * self.gathered),) if self.t > 1 else ()
        moments = (*masked, Moment("lookup", self.gathered or self.stream, self.w * made)) if table.trained else ()
        again = self.config.model.shares_embedding and with_head
        kept = (Kept("embedding", ids, "lookup"),) if table.trained else ()
        if factors:  # the second is looked up, and its features go through the first
            between, made = self._between(factors), sum(each.gradient(self.t) for each in factors)
            moments = (Moment("lookup", (2 if self.t > 1 else 1) * between, self.w * made),)
            kept = (Kept("adapters", ids + between // self.t, "lookup"),)
        forward = 2 * self.gathered + 2 * self.stream * bool(factors)
        return Unit("embedding", self._weights([table, *factors]), kept, forward, moments, with_stage=again)

    def _between(self, factors: Sequence[Weight]) -> int:
        """Bytes of the features between two factors of the embedding or the head, of all tokens; 0: there are none."""
        return self.tokens * factors[0].shape[0] * self.w if factors else 0

    def copied_embedding(self) -> Unit:
        """The last stage's copy of the embedding, which the head or multi-token prediction uses."""
        model = self.config.model
        weights = self._weights([head(model) if model.tie_embeddings else embedding(model)])
        return Unit("embedding", weights, (), 0, (), with_stage=True, copy=True)

    def further(self) -> Unit:
        """The final norm and another look-up of embeddings, where multi-token prediction begins."""
        depth, made = self.config.model.depth, embedding(self.config.model).gradient(self.t)
        ids = (ID_BYTES + 1) * self.tokens * depth if self.t > 1 else 0
        masked = (Moment("mask", 2 * depth * self.gathered),) if self.t > 1 else ()
        moments = (
            Moment("norm", self.norm + (1 + self.predicted) * self.stream),
            *masked,
            Moment("lookup", depth * (self.gathered or self.stream), self.w * made),
        )
        kept = Kept("norms", self.stream + self.statistic, "norm"), Kept("embedding", ids, "lookup")
        return Unit(FURTHER, self._weights([]), kept, 2 * depth * self.gathered, moments)

    def layer(self, kind: LayerKind, mode: Mode) -> Unit:
        """A layer of `kind` that recomputes as `mode` says."""
        if (kind, mode) not in self._layers:
            self._layers[kind, mode] = self._layer(kind, mode)
        return self._layers[kind, mode]

    @cached_property
    def _layers(self) -> dict[tuple[LayerKind, Mode], Unit]:
        """Layers that were asked for, by kind and mode of recompute."""
        return {}

    def _layer(self, kind: LayerKind, mode: Mode) -> Unit:
        layer, everything = Layer(self.config.model.width, kind), self._everything(kind, mode)
        apart, own = layer.exchanged(self.config.parallel.ep)
        again = [kept for kept in everything if _is_made_again(kept, mode)]
        remade, cheap = tuple(again) if mode == "full" else (), tuple(again) if mode == "selective" else ()
        left = [kept for kept in everything if not _is_made_again(kept, mode)]
        least = self.stream // OFFLOAD_SHARE if self.config.train.offload_activations else math.inf
        stays = [kept for kept in left if kept.bytes < least or kept.remembered]
        offloaded = tuple(kept for kept in left if kept not in stays)
        passing = (*remade, *cheap, *offloaded)
        where = "remade" if mode == "full" else "fetched" if offloaded else "kept"
        of_last = layer.parts[-1]
        made = [kept for kept in (*passing, *layer.dropped(self)) if kept.component == of_last.name]
        late = sum(kept.bytes for kept in stays if kept.of_arrivals)
        return Unit(
            "layer",
            self._weights(own),
            kept=tuple(stays),
            forward=2 * self.stream + of_last.forward(self, made),
            backward=tuple(at for at in layer.backward(self) if at.where in ("", where)),
            remade=remade,
            cheap=cheap,
            offloaded=offloaded,
            pauses=tuple((pause.temporaries, 0 if pause.arrived else late) for pause in of_last.pauses(self)),
            puts_off=True,
            casts=sum(self._casts(part) for part in layer.parts),
            apart=self._weights(apart) if apart else None,
            rows=next((kept.bytes for kept in everything if kept.until == "gate and up"), 0) if apart else 0,
        )

    def _casts(self, part: Part) -> int:
        """Bytes of a part's weights in 8 bits with their scales, in both layouts."""
        narrow = {into_stream: self.in_8_bits(part.weights(), into_stream) for into_stream in (False, True)}
        matrices = (weight for _, weight in part.weights() if weight.role.kind is RoleKind.MATRIX)
        parts = (weight.part(self.t) for weight in matrices if narrow[weight.role.into_stream])
        return sum(self.narrow(self.w * math.prod(part), size) for part in parts for size in part)

    def layer_bytes(self, kind: LayerKind, mode: Mode) -> int:
        """Bytes that a layer keeps from forward to backward, on the device and in host memory."""
        return sum(kept.bytes for kept in self._everything(kind, mode) if not _is_made_again(kept, mode))

    def _everything(self, kind: LayerKind, mode: Mode) -> tuple[Kept, ...]:
        """Tensors that a layer without recompute keeps, its input for full recompute whether needed or not, and what
        selective recompute keeps besides."""
        key = kind, mode
        if key not in self._kept:
            found = Layer(self.config.model.width, kind).kept(self, with_input=mode == "full")
            self._kept[key] = tuple(kept for kept in found if mode == "selective" or not kept.recipe)
        return self._kept[key]

    @cached_property
    def _kept(self) -> dict[tuple[LayerKind, Mode], tuple[Kept, ...]]:
        """By kind of layer and mode: what was asked for."""
        return {}

    def outside(self, stages: int) -> dict[int, int]:
        """By stage: bytes that the embedding and the head keep of a micro-batch; stages with neither are left out."""
        ends = ((0, self.embedding(with_head=stages == 1)), (stages - 1, self.head()))
        found: Counter[int] = Counter()
        for stage, part in ends:
            found[stage] += sum(kept.bytes for kept in part.kept)
        return found

    def head(self) -> Unit:
        """The final norm, the output layer and the loss. The weight of a tied output layer is in the embedding."""
        model, narrow = self.config.model, self.w < self.z
        factors = [weight for weight in head_weights(model).values() if weight.role.adapts]
        first, second = (each.gradient(self.t) for each in factors) if factors else (0, 0)
        between, apart = self._between(factors), self.stream if factors and self.t > 1 else 0
        columns, output = self._columns, head(model)
        made = output.gradient(self.t)
        chunk, several = self._chunk, self.chunks_head
        logits, inputs = chunk * columns * self.w, self.predicted * (self.gathered or self.stream)
        capped = model.logits_softcap is not None  # backward of a cap needs another block
        # A block lives until the next one is made.
        blocks = min(2 * ROWS, chunk) * (narrow or capped) + min(ROWS, chunk) * capped
        block = blocks * columns * self.z
        kept = [
            Kept("head", inputs + logits + self.z * chunk, "output"),
            Kept("adapters", between + apart, "factors" if factors else "output"),
        ]
        made += second
        if several:  # the gradients of the inputs, and the summed gradients of weights
            kept.append(Kept("head", inputs + between + self.z * made, "output"))
        backward = [
            Moment("loss", block),
            Moment("output", 0 if several else inputs + between, self.w * made, summed=0 if several else self.z * made),
        ]
        if model.mtp is None:
            kept.append(Kept("norms", self.stream + self.statistic, "norm"))
            backward.append(Moment("norm", self.norm))
        if factors:  # another gradient of the inputs is made, and added
            backward.insert(2, Moment("factors", 2 * self.stream + between, self.w * first))
        forward = block + (logits if several and self.t > 1 else 0)
        return Unit("head", self._weights(head_weights(model).values()), tuple(kept), forward, tuple(backward))

    @property
    def chunks_head(self) -> bool:
        """Flag: the head makes logits in several chunks; it then makes its gradients in F."""
        return self._chunk < self.predicted * self.tokens

    @property
    def _chunk(self) -> int:
        """Tokens that the head makes logits of at a time."""
        tokens = self.predicted * self.tokens
        return min(chunk_tokens(tokens, self.config.model.width, self.w, self.t), tokens)

    @property
    def angles(self) -> int:
        """Bytes of cosines and sines for a step: of the rank's positions, or of all if documents restart positions."""
        length = self.config.model.sequence_length
        if not self.config.data.reset_positions:
            length = self.tokens if self.config.joins_samples else length // self.config.parallel.cp
        return length * self._turning * self.z

    @cached_property
    def turns(self) -> int:
        """Bytes of cosines and sines that a stage looks up for a micro-batch; 0 unless documents restart positions."""
        return self.tokens * self._turning * self.z if self.config.data.reset_positions else 0

    @property
    def _turning(self) -> int:
        """Cosines and sines of a position, in the tables of all rotations."""
        return sum(rotation.width for rotation in rotations(self.config.model))

    @property
    def inputs(self) -> int:
        """Bytes of a micro-batch's samples, and of the tokens, targets and positions that are made of the samples."""
        adapter = self.config.adapter
        made = 2 + self.config.data.reset_positions + (adapter is not None and adapter.dropout > 0)
        made += 2 * self.config.model.depth
        return ID_BYTES * (self.config.batch.micro_size * (self.config.model.sequence_length + 1) + made * self.tokens)

    def _weights(self, weights: Iterable[Weight]) -> Weights:
        """Elements of `weights` on this rank, which has a part of those that tp splits."""

        def elements(weight: Weight) -> int:
            return math.prod(weight.part(self.t, self.config.parallel.ep))

        def states(weight: Weight) -> int:
            return len(state_names(self.config.optim, weight)) * elements(weight)

        def copies(weight: Weight) -> int:
            return 0 if self.config.on_host(trained=True) else host_copies(self.config.optim, weight) * elements(weight)

        several = list(weights)
        trained = [weight for weight in several if weight.trained]
        last_recut = list(filter(self._recut, trained))[-1:]
        sizes = [self._gradient(weight) for weight in trained]
        newest = {id(weight): weight for weight in (*trained[-1:], *last_recut)}.values()
        return Weights(
            Parameters.of(several, elements),
            Parameters.of(several, self._gradient),
            Parameters.of(several, states),
            Parameters.of(several, copies),
            newest=sum(map(self._gradient, newest)),
            twice=max((size - sum(sizes[at + 1 :]) for at, size in enumerate(sizes)), default=0),
            recut=sum(map(self._recut, several)),
            last_recut=sum(map(self._gradient, last_recut)),
            four_bits=Parameters.of((weight for weight in several if weight.four_bits), elements),
        )

    def _gradient(self, weight: Weight) -> int:
        return weight.gradient(self.t, self.config.parallel.ep)

    def _recut(self, weight: Weight) -> int:
        """Elements of a weight on this rank if FSDP2 shards it along another dimension than the first, else 0."""
        parallel = self.config.parallel
        return weight.recut(parallel.expert_shards, parallel.ep) if weight.role.of_expert else 0

    @property
    def _columns(self) -> int:
        """Tokens of the vocabulary on one rank, with padding."""
        return embedding(self.config.model).part(self.t)[0]

    @property
    def repeats(self) -> bool:
        """Flag: attention of any layer repeats keys and values for every query head."""
        heads = {kind.attention.heads for kind in layer_kinds(self.config.model)}
        return any(AttentionMemory(self, each, normed=False).repeats for each in heads)


def _is_made_again(kept: Kept, mode: Mode) -> bool:
    """Return whether recompute makes a tensor again in backward."""
    return not (kept.given or kept.remembered) if mode == "full" else kept.cheap and mode == "selective"
