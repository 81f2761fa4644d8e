"""What one rank keeps of a micro-batch for backward, and what backward needs beside that, in bytes.

The parts of a stage are those that FSDP2 gathers by themselves: the embedding, every layer, the head. Backward of a
part is a sequence of moments; each has temporaries, and ends with the release of some of what was kept.

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

The sum is Korthikanti et al. 2022 (arXiv 2205.05198), eq. 4, less what fused kernels need not keep.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from megalite.config.layers import AttentionKind, LayerKind, layer_kinds
from megalite.config.schema import Config
from megalite.plan.recompute_modes import Mode
from megalite.plan.roles import Kind
from megalite.plan.size import Parameters, layer_parameters
from megalite.plan.states import state_names
from megalite.plan.weights import Weight, embedding, final_norm, head, layer_weights

BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}  # by train.precision
TOKEN = 8  # bytes of a token id
ROWS = 128  # rows that cross_entropy handles at a time
FEWEST, TILE = 4096, 128  # tokens of the head's smallest chunks, and what chunks are multiples of
CLASSES = 1024  # whose logits it widens at a time for sums of its weight's gradient
Item = tuple[str, str]  # one of the kinds of `plan.memory`, or HOST, and the component of the model
OFFLOAD_SHARE = 32  # tensors below this share of a layer's input, such as its rows' statistics, are not worth a copy


def chunk_tokens(tokens: int, width: int, itemsize: int, ranks: int) -> int:
    """How many tokens' logits the head makes at a time; `megalite_kernels.linear_cross_entropy` has the reasons."""
    wide, buffers = max(itemsize, 4), 2 if ranks > 1 else 1
    most = max(width // buffers, FEWEST)
    if tokens * itemsize <= buffers * most * itemsize + width * wide:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // most))
    return min(-(-even // TILE) * TILE, most)


@dataclass(frozen=True)
class Kept:
    """A tensor, or several of one fate, that a forward pass leaves for backward."""

    component: str
    bytes: int
    until: str  # the moment of backward that uses it last
    for_weights: bool = False  # gradients of weights need it: a split backward keeps it until W
    cheap: bool = False  # selective recompute makes it again when backward needs it


@dataclass(frozen=True)
class Moment:
    """A place in the backward pass of a part where memory may peak."""

    name: str
    temporaries: int
    weights: int = 0  # gradients of weights made here, which stay at least until those of the whole part are there
    put_off: int = 0  # gradients of outputs that a split backward keeps until W
    again: int = 0  # temporaries of W, which makes them from what is put off


@dataclass(frozen=True)
class Weights:
    """How many elements parameters have, and all states that the optimizer keeps of them."""

    parameters: Parameters
    states: Parameters

    @cached_property
    def total(self) -> int:
        """Parameters."""
        return self.parameters.total

    @cached_property
    def by_component(self) -> tuple[tuple[str, int, int], ...]:
        """The components of the model that have parameters here, how many, and how many states."""
        both = zip(asdict(self.parameters).items(), asdict(self.states).values(), strict=True)
        return tuple((name, count, states) for (name, count), states in both if count)


@dataclass(frozen=True)
class Part:
    """The embedding, a layer or the head of a stage, as one rank holds it."""

    name: str
    weights: Weights  # on this rank, before data-parallel sharding
    newest: int  # elements of the last of them
    kept: tuple[Kept, ...]
    forward: int  # temporaries of the forward pass, where it takes most
    backward: tuple[Moment, ...]  # in order
    remade: tuple[Kept, ...] = ()  # made again when backward begins, by full recompute
    cheap: tuple[Kept, ...] = ()  # made again when backward needs it, by selective recompute
    offloaded: tuple[Kept, ...] = ()  # in host memory until backward comes to the part after
    puts_off: bool = False  # a split backward leaves the gradients of weights to W
    with_stage: bool = False  # a tied embedding, used at both ends, is gathered as long as its stage is in use
    copy: bool = False  # of the tied embedding of the first stage
    times: int = 1  # how many like it stand here one behind the other; bytes are then of all, parameters of one

    @cached_property
    def again(self) -> dict[str, int]:
        """By moment of backward: bytes that selective recompute makes again for it."""
        return {at.name: sum(kept.bytes for kept in self.cheap if kept.until == at.name) for at in self.backward}

    @cached_property
    def freed(self) -> dict[str, Counter[Item]]:
        """By moment of backward: the bytes that the layer's backward needs no more."""
        return {moment.name: _bytes(self._ending(moment)) for moment in self.backward}

    @cached_property
    def put_off(self) -> dict[str, Counter[Item]]:
        """By moment of a backward that is split: the bytes that W needs, from then on."""
        found = {}
        for moment in self.backward:
            again = [("temporaries", kept) for kept in self.cheap if kept.until == moment.name]
            needed = [(kind, kept) for kind, kept in (*self._ending(moment), *again) if kept.for_weights]
            found[moment.name] = _bytes(needed) + Counter({("gradients", "put off"): moment.put_off})
        return found

    def _ending(self, moment: Moment) -> list[tuple[str, Kept]]:
        """What is held until the moment, and its kind."""
        made = [("temporaries", kept) for kept in (*self.remade, *self.offloaded)]
        return [
            (kind, kept)
            for kind, kept in (*(("activations", kept) for kept in self.kept), *made)
            if kept.until == moment.name
        ]

    def repeated(self, times: int) -> "Part":
        """So many of these as one."""

        def all_of(group: tuple[Kept, ...]) -> tuple[Kept, ...]:
            return tuple(replace(kept, bytes=times * kept.bytes) for kept in group)

        moments = tuple(replace(x, weights=times * x.weights, put_off=times * x.put_off) for x in self.backward)
        return replace(
            self,
            kept=all_of(self.kept),
            backward=moments,
            remade=all_of(self.remade),
            cheap=all_of(self.cheap),
            offloaded=all_of(self.offloaded),
            times=times,
        )


def _bytes(group: Iterable[tuple[str, Kept]]) -> Counter[Item]:
    found: Counter[Item] = Counter()
    for kind, kept in group:
        found[kind, kept.component] += kept.bytes
    return found


@dataclass(frozen=True)
class Activations:
    """Sizes of a configuration's activations on one rank."""

    config: Config

    def embedding(self, with_head: bool) -> Part:
        """The table, and its look-up; with_head: the same stage has the head, which may use it."""
        ids = (TOKEN + 1) * self.tokens if self.t > 1 else 0
        moment = Moment("lookup", self.stream + 2 * self.gathered, self.w * self._matrix)
        tied = self.config.model.tie_embeddings and with_head
        kept = (Kept("embedding", ids, "lookup"),)
        weights = self._weights([embedding(self.config.model)])
        return Part("embedding", weights, self._matrix, kept, 2 * self.gathered, (moment,), with_stage=tied)

    def tied_copy(self) -> Part:
        """The last stage's copy of the embedding, which the head uses."""
        weights = self._weights([head(self.config.model)])
        return Part("embedding", weights, self._matrix, (), 0, (), with_stage=True, copy=True)

    def layer(self, kind: LayerKind, mode: Mode) -> Part:
        """A layer of `kind` that recomputes as `mode` says."""
        everything = self._layer_kept(kind)
        remade = everything[1:] if mode == "full" else ()
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
        """What a layer keeps from forward to backward, wherever."""
        part = self.layer(kind, mode)
        return sum(kept.bytes for kept in (*part.kept, *part.offloaded))

    def outside(self, stages: int) -> dict[int, int]:
        """By stage: what the embedding and the head keep of a micro-batch; nothing elsewhere."""
        ends = ((0, self.embedding(with_head=stages == 1)), (stages - 1, self.head()))
        found: Counter[int] = Counter()
        for stage, part in ends:
            found[stage] += sum(kept.bytes for kept in part.kept)
        return found

    def head(self) -> Part:
        """The final norm, the output layer and the loss; the weight of a tied one is elsewhere."""
        model, tied, narrow = self.config.model, self.config.model.tie_embeddings, self.w < self.z
        columns = model.vocab_size // self.t
        chunk = min(chunk_tokens(self.tokens, model.width, self.w, self.t), self.tokens)
        several = chunk < self.tokens
        logits, inputs = chunk * columns * self.w, self.gathered or self.stream
        block = 2 * min(ROWS, chunk) * columns * self.z if narrow else 0  # one is there until the next one is
        copies = chunk * (min(CLASSES, columns) + model.width) * self.z if narrow and several else 0
        kept = [
            Kept("norms", self.stream + self.statistic, "norm"),
            Kept("head", inputs + logits + self.z * chunk, "output"),
        ]
        if several:  # the gradient of the inputs, and the sum of that of the weight
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
    def angles(self) -> int:
        """Cosines and sines for a step, of the positions on a rank, or of all where they depend on documents."""
        model, resets = self.config.model, self.config.data.reset_positions
        return model.sequence_length // (1 if resets else self.config.parallel.cp) * model.head_size * self.z

    @cached_property
    def turns(self) -> int:
        """Cosines and sines that a stage looks up for a micro-batch, where positions depend on documents."""
        return self.tokens * self.config.model.head_size * self.z if self.config.data.reset_positions else 0

    @property
    def inputs(self) -> int:
        """Of a micro-batch: its samples, and the tokens, targets and positions made of them."""
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
        """The residual stream on one rank, which is what stages hand to each other."""
        return self.tokens * self.config.model.width // self.t * self.w

    @cached_property
    def statistic(self) -> int:
        """One number for each position on a rank."""
        return self.tokens // self.t * self.z

    @cached_property
    def gathered(self) -> int:
        """The residual stream gathered over tp; 0 where that takes no copy."""
        return self.stream * self.t if self.t > 1 else 0

    def _weights(self, weights: Iterable[Weight]) -> Weights:
        """What this rank has of them: norms whole, of the others a share."""

        def elements(weight: Weight) -> int:
            return weight.elements // (1 if weight.role.kind is Kind.NORM else self.t)

        def states(weight: Weight) -> int:
            return len(state_names(self.config.optim, weight.role)) * elements(weight)

        several = list(weights)
        return Weights(Parameters.of(several, elements), Parameters.of(several, states))

    @property
    def _matrix(self) -> int:
        """Elements of the embedding, or of the head, on one rank."""
        return self.config.model.vocab_size * self.config.model.width // self.t

    def _down(self, kind: LayerKind) -> int:
        """Elements of the last matrix of a layer, on one rank."""
        return self.config.model.width * kind.feed_forward.width // self.t

    def _heads(self) -> tuple[int, int]:
        """Bytes of activations q and k wide, on one rank."""
        model, one = self.config.model, self.tokens * self.w
        return one * model.heads * model.head_size // self.t, one * model.kv_heads * model.head_size // self.t

    def _hidden(self, kind: LayerKind) -> int:
        """Bytes of activations f wide, on one rank."""
        return self.tokens * self.w * kind.feed_forward.width // self.t

    def _layer_kept(self, kind: LayerKind) -> tuple[Kept, ...]:
        """What a layer keeps, its input first."""
        model = self.config.model
        (q, k), f = self._heads(), self._hidden(kind)
        of_head = self.tokens * self.z // self.t  # one number for each position and head, all heads split over tp
        normed = model.qk_norm
        found = [
            Kept("norms", self.stream, "attention norm"),
            Kept("norms", self.statistic, "attention norm"),
            Kept("attention", self.stream, "projections", for_weights=True, cheap=True),
            *self._attention_kept(kind.attention),
            Kept("attention", model.heads * of_head, "attention"),
            Kept("attention", q, "output", for_weights=True),
            Kept("norms", self.stream, "mlp norm"),
            Kept("norms", self.statistic, "mlp norm"),
            Kept("mlp", self.stream, "gate and up", for_weights=True, cheap=True),
            Kept("mlp", f, "swiglu"),
            Kept("mlp", f, "swiglu"),
            Kept("mlp", f, "down", for_weights=True, cheap=True),
        ]
        for width, heads in ((q, model.heads), (k, model.kv_heads)) if normed else ():
            found += [Kept("norms", width, "rope"), Kept("norms", heads * of_head, "rope")]
        return tuple(found)

    def _layer_backward(self, kind: LayerKind) -> tuple[Moment, ...]:
        """Of a layer; the gradient of the residual stream is there all the time."""
        model, weights, t, w = self.config.model, layer_parameters(self.config.model, kind), self.t, self.w
        (q, k), f = self._heads(), self._hidden(kind)
        down = w * self._down(kind)
        output = w * model.width * model.heads * model.head_size // t
        stream, gathered = self.stream, self.gathered or self.stream
        return (
            Moment("down", stream + self.gathered + f, down, put_off=gathered),
            Moment("swiglu", stream + 3 * f),
            Moment("gate and up", stream + self._linear(2 * f), w * weights.mlp // t - down, 2 * f, self.gathered),
            Moment("mlp norm", stream + self._norm()),
            Moment("output", stream + self.gathered + q, output, put_off=gathered),
            Moment("attention", stream + q + self._attention_backward(kind.attention)),
            Moment("rope", stream + q * (2 + self.z // w) + 2 * k),
            Moment(
                "projections",
                stream + self._linear(q + 2 * k),
                w * weights.attention // t - output,
                q + 2 * k,
                self.gathered,
            ),
            Moment("attention norm", stream + self._norm()),
        )

    def _attention_kept(self, kind: AttentionKind) -> tuple[Kept, ...]:
        """Queries, keys and values, as the method of attention has them; copies are not what RoPE makes again."""
        q, k = self._heads()
        normed, stacked = self.config.model.qk_norm, 2 * k * self._kv_copies
        if self._exchanges_heads:  # its output by heads is kept beside that by positions
            again = stacked if self._in_blocks(kind) else 2 * q if self._repeats(kind) else 0
            return Kept("attention", q + stacked + again, "attention"), Kept("attention", q, "attention")
        queries = Kept("attention", q, "attention", cheap=normed)
        if self.config.parallel.cp > 1 or self._in_blocks(kind):
            return queries, Kept("attention", stacked, "attention")
        if self._repeats(kind):
            return queries, Kept("attention", 2 * q, "attention")
        return queries, Kept("attention", k, "attention", cheap=normed), Kept("attention", k, "attention")

    def _attention_backward(self, kind: AttentionKind) -> int:
        """The gradients of queries, keys and values, and what the method of attention takes for them."""
        q, k = self._heads()
        wide, cp, kv, documents = self.z // self.w, self.config.parallel.cp, 2 * k, self._in_blocks(kind)
        if self._exchanges_heads:
            kv *= self._kv_copies
            sums = wide * (q + kv) + self._block(q, kv) if documents else 3 * q + kv if self._repeats(kind) else 0
            return max(2 * (q + kv), sums) + q
        if cp == 1 and not documents:
            return 3 * q + kv if self._repeats(kind) else q + kv
        sums, own = wide * (q + kv), self._block(q, kv)  # in float32 or wider
        if cp == 1:
            return sums + own
        if self.config.parallel.context.method == "ring":
            others = 2 if cp > 2 else 1  # sums for another rank: those being made, and those on their way home
            return sums + own + (others - 1) * kv + others * wide * kv
        far = self._block(q // 2, (cp - 1) * kv) + (1 + wide) * cp * kv
        return sums + max(far, (1 + 3 * wide) * cp * kv)  # then the sums are sorted by rank

    def _block(self, queries: int, keys_and_values: int) -> int:
        """The gradients of a block of attention; the CPU makes those of keys by query heads, and joins pieces."""
        if self.config.run.device == "cuda":
            return queries + keys_and_values
        model = self.config.model
        return 2 * (queries + keys_and_values * model.heads // model.kv_heads) + keys_and_values

    def _in_blocks(self, kind: AttentionKind) -> bool:
        """Whether attention over whole sequences goes block by block."""
        model = self.config.model
        own = kind.softcap is not None or kind.window_in(model.sequence_length) is not None
        return own or self.config.data.mask_documents

    @property
    def repeats(self) -> bool:
        """Whether attention of any layer has keys and values repeated for every query head."""
        return any(self._repeats(kind.attention) for kind in set(layer_kinds(self.config.model)))

    def _repeats(self, kind: AttentionKind) -> bool:
        """Whether attention over whole sequences has keys and values repeated for every query head."""
        model, cp = self.config.model, self.config.parallel.cp
        whole = (cp == 1 or self._exchanges_heads) and not self._in_blocks(kind)
        on_cuda = self.config.run.device == "cuda" and self.config.train.precision == "fp32"
        return whole and on_cuda and model.kv_heads * self._kv_copies < model.heads

    @property
    def _exchanges_heads(self) -> bool:
        return self.config.parallel.context.method == "ulysses" and self.config.parallel.cp > 1

    @property
    def _kv_copies(self) -> int:
        """Of each kv head, so that ranks can share them out."""
        if not self._exchanges_heads:
            return 1
        kv_heads = self.config.model.kv_heads // self.t
        return math.lcm(kv_heads, self.config.parallel.cp) // kv_heads

    def _linear(self, grads: int) -> int:
        """Backward of layers that share an input: `grads` of their outputs, the input gathered, and its gradient."""
        return grads + (2 * self.gathered + self.stream if self.gathered else self.stream)

    def _norm(self) -> int:
        """Backward of a norm: its gradient, and three temporaries in float32 or wider."""
        return self.stream + 3 * self.stream * self.z // self.w
