"""The kinds of a model's layers. All code that looks at layers reads them here, so layers may differ."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import ClassVar, Literal, NamedTuple, get_args

from megalite.config import model_schema
from megalite.config.model_schema import BaseForm, LayerTarget, Model, RopeScaling, Target
from megalite.config.parametrization import multipliers


@dataclass(frozen=True)
class Scores:
    """Range of a query's attention among the tokens before it, and the size of scores.

    window: so many keys, the query's own included, as in Mistral 7B (arXiv 2310.06825, §2); None: all.
    softcap: scores become softcap · tanh(score / softcap), as in Gemma 2 (arXiv 2408.00118, §2); None: they stay.
    scale: what products of queries and keys are multiplied by, before the cap; None: 1/√(width of a query).
    sinks: every query head has one more score, which is learned, as of a key whose value is 0 (arXiv 2508.10925).
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False

    def window_in(self, length: int) -> int | None:
        """The window where a sequence of `length` is longer than that; else every query attends to all before it."""
        return self.window if self.window is not None and self.window < length else None


@dataclass(frozen=True)
class Heads:
    """The heads of attention, as kernels and context parallelism see them, whatever projections make them.

    count: heads of queries. kv_count: heads of keys and values, each shared by count / kv_count heads of queries.
    width: features of a query and of a key. rotary_width: of these, the first ones that positions may turn.
    value_width: features of a value, and so of the output of a head.
    """

    count: int
    kv_count: int
    width: int
    rotary_width: int
    value_width: int
    scores: Scores = Scores()

    @property
    def queries(self) -> int:
        """Features of all queries of a token."""
        return self.count * self.width

    @property
    def keys(self) -> int:
        return self.kv_count * self.width

    @property
    def values(self) -> int:
        return self.kv_count * self.value_width

    @property
    def outputs(self) -> int:
        return self.count * self.value_width


TARGETS: dict[str, Target] = {  # by the last name of a matrix
    "q": "query",
    "q_up": "query",
    "k": "key",
    "k_up": "key",
    "v": "value",
    "v_up": "value",
    "o": "attention_output",
    "q_down": "query_latent",
    "kv_down": "latent",
    "k_shared": "latent",
    "gate": "gate",
    "up": "up",
    "down": "down",
    "embed": "embedding",
    "output": "head",
}


@dataclass(frozen=True)
class GroupedQuery:
    """Grouped-query attention (arXiv 2305.13245).

    biases: of queries, keys and values. out_bias: of the output. norms: RMSNorm of queries and keys, "head": of every
    head by itself, "all": of all heads of a token together; None: there is none.
    """

    heads: Heads
    biases: bool = False
    norms: Literal["head", "all"] | None = None
    out_bias: bool = False

    matrices: ClassVar = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Latent:
    """Latent attention (arXiv 2405.04434, §2.1).

    The features of keys that turn are made of the token itself, once for all heads; the others and values are made of
    `key_rank` features. query_rank: features of which queries are made; None: all of the token's.
    """

    heads: Heads
    query_rank: int | None
    key_rank: int

    @property
    def matrices(self) -> tuple[str, ...]:
        queries = ("q",) if self.query_rank is None else ("q_up", "q_down")
        return (*queries, "kv_down", "k_shared", "k_up", "v_up", "o")


@dataclass(frozen=True)
class SwiGLU:
    """SwiGLU (arXiv 2002.05202) with a hidden width, or GEGLU where the activation is gelu."""

    width: int
    activation: Literal["silu", "gelu"] = "silu"

    matrices: ClassVar = ("gate", "up", "down")


@dataclass(frozen=True)
class Router:
    """Choice of experts for a token, by a score of each; the fields are those of `model_schema.Experts`."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    correction_rate: float | None = None
    balance_loss: float = 0.0
    z_loss: float = 0.0
    force_balance: bool = False


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts: `count` SwiGLUs of a hidden width, of which `active` compute a token.

    shared: one more that computes every token; None: there is none. shared_gate: its output is multiplied by a score.
    clamped: SwiGLU in the form of gpt-oss (`megalite_kernels.weighted_swiglu`). biases: of the router, and of all
    matrices of experts.
    """

    count: int
    active: int
    width: int
    router: Router = Router()
    shared: SwiGLU | None = None
    shared_gate: bool = False
    clamped: bool = False
    biases: bool = False

    @property
    def matrices(self) -> tuple[str, ...]:
        """Matrices that are not of experts."""
        return () if self.shared is None else self.shared.matrices


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv 2104.09864): the base of their wavelengths, and how these are stretched."""

    base: float
    scaling: RopeScaling | None = field(default=None, hash=False)


@dataclass(frozen=True)
class Rotation:
    """Parameters of the angles of a layer's queries and keys, beside positions and the sequence's length.

    width: features of a head. rotary_width: of these, the first ones, which turn.
    """

    rope: Rope
    width: int
    rotary_width: int


@dataclass(frozen=True)
class Adapter:
    """Pairs of factors beside the matrices that `targets` names: a layer adds scale · x Aᵀ Bᵀ to its x Wᵀ.

    dora: every row of W + scale · B A is then scaled to a norm that is trained, too.
    """

    rank: int
    scale: float
    targets: frozenset[Target]
    dropout: float = 0.0
    base: BaseForm = "compute"
    dora: bool = False


@dataclass(frozen=True)
class LayerKind:
    """Parts of a layer. Layers of equal kind differ in nothing but their weights.

    norms: whether attention and feed-forward have a norm before them, after them, or both. rope: None: queries and keys
    are not turned by their positions (NoPE, arXiv 2305.19466). adapter: of a layer whose own weights are not trained.
    mtp: the layer is one of multi-token prediction.
    """

    attention: GroupedQuery | Latent
    feed_forward: SwiGLU | Mixture
    norms: frozenset[Literal["before", "after"]]
    rope: Rope | None
    adapter: Adapter | None = None
    mtp: bool = False

    @property
    def base(self) -> BaseForm | None:
        """The form in which the layer's own weights are kept beside an adapter; None: they are trained."""
        return None if self.adapter is None else self.adapter.base

    @property
    def mixture(self) -> Mixture | None:
        """The layer's experts; None: its feed-forward is one for all tokens."""
        return self.feed_forward if isinstance(self.feed_forward, Mixture) else None

    @property
    def rotation(self) -> Rotation | None:
        heads = self.attention.heads
        return None if self.rope is None else Rotation(self.rope, heads.width, heads.rotary_width)


NORMS: dict[str, frozenset[Literal["before", "after"]]] = {
    "pre": frozenset(["before"]),
    "post": frozenset(["after"]),
    "both": frozenset(["before", "after"]),
}


def layer_kinds(model: Model) -> tuple[LayerKind, ...]:
    """The kind of every layer of `model`, first to last; those of multi-token prediction are like the last."""
    attention, rope = model.attention, Rope(model.rope_theta, model.rope_scaling)
    usual = LayerKind(
        _attention(model),
        SwiGLU(model.ffn, model.activation),
        NORMS[model.norm],
        rope if attention.window_rope_theta is None else Rope(attention.window_rope_theta),
        None if model.adapter is None else adapter_of(model.adapter),
    )
    return _kinds(model.layers, usual, rope, attention.full_every, attention.nope_every, _experts(model), model.depth)


def _attention(model: Model) -> GroupedQuery | Latent:
    attention, latent, scaling = model.attention, model.attention.latent, model.rope_scaling
    scores = Scores(attention.window, attention.softcap, multipliers(model).scores, attention.sinks)
    heads = Heads(model.heads, model.kv_heads, model.head_size, model.rotary_size, model.head_size, scores)
    if latent is None:
        norms = model.qk_norm_width if model.qk_norm else None
        return GroupedQuery(heads, model.qkv_bias, norms, model.out_bias)
    if scaling is not None and scaling.mscale_all_dim:
        sharper = yarn_factor(scaling, scaling.mscale_all_dim) ** 2
        scores = replace(scores, scale=sharper / math.sqrt(model.head_size))
    return Latent(replace(heads, value_width=latent.value_width, scores=scores), latent.query_rank, latent.key_rank)


def inputs_of_matrices(model: Model) -> Iterator[tuple[str, int, bool]]:
    """By key: how many features matrices of layers take, and whether ranks of tp share these out."""
    yield "model.width", model.width, False
    for kind in dict.fromkeys(layer_kinds(model)):
        attention, mixture = kind.attention, kind.mixture
        yield "model.heads · head_width", attention.heads.outputs, True
        if isinstance(attention, Latent):
            yield "model.attention.latent.key_rank", attention.key_rank, False
            if attention.query_rank is not None:
                yield "model.attention.latent.query_rank", attention.query_rank, False
        if isinstance(kind.feed_forward, SwiGLU):
            yield "model.ffn", kind.feed_forward.width, True
        if mixture is not None:
            yield "model.experts.width", mixture.width, False
            if mixture.shared is not None:
                yield "model.experts.shared_width", mixture.shared.width, True


def targets_of(model: Model) -> list[Target]:
    """The targets of adapters that `model` has."""
    kinds = layer_kinds(model)
    names = (name for kind in kinds for part in (kind.attention, kind.feed_forward) for name in part.matrices)
    experts: list[Target] = ["experts"] if any(kind.mixture for kind in kinds) else []
    return [*dict.fromkeys(TARGETS[name] for name in names), *experts, "embedding", "head"]


def adapter_of(adapter: model_schema.Adapter) -> Adapter:
    """The pairs of factors that a configuration describes."""
    targets = get_args(LayerTarget) if adapter.targets == "all" else adapter.targets
    scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.rslora else adapter.rank)
    return Adapter(adapter.rank, scale, frozenset(targets), adapter.dropout, adapter.base, adapter.dora)


def yarn_factor(scaling: RopeScaling, scale: float) -> float:
    """m(scale) of YaRN (arXiv 2309.00071, §3.4)."""
    return 1 + scale * math.log(scaling.factor) / 10


def _experts(model: Model) -> "_Experts | None":
    experts = model.experts
    if experts is None:
        return None
    router = Router(**{each.name: getattr(experts, each.name) for each in fields(Router)})
    shared = None if experts.shared_width is None else SwiGLU(experts.shared_width)
    mixture = Mixture(
        experts.count,
        experts.active,
        experts.width or model.ffn,
        router,
        shared,
        experts.shared_gate,
        clamped=experts.gate == "clamped",
        biases=experts.biases,
    )
    return _Experts(mixture, experts.first_dense, experts.every)


class _Experts(NamedTuple):
    """A model's experts, and which layers have them."""

    mixture: Mixture
    first_dense: int
    every: int


def rotations(model: Model) -> list[Rotation]:
    """The rotations of all layers, each once."""
    return list(dict.fromkeys(kind.rotation for kind in layer_kinds(model) if kind.rotation is not None))


@lru_cache(maxsize=64)  # a search of layouts asks thousands of times
def _kinds(
    layers: int,
    usual: LayerKind,
    rope_to_all: Rope,
    full_every: int | None,
    nope_every: int | None,
    experts: _Experts | None,
    depth: int,
) -> tuple[LayerKind, ...]:
    attention = usual.attention
    scores = replace(attention.heads.scores, window=None)
    to_all = replace(attention, heads=replace(attention.heads, scores=scores))

    def every(number: int, n: int | None) -> bool:
        return number % (n or layers + 1) == 0

    @cache
    def kind(attends_to_all: bool, rotary: bool, mixed: bool) -> LayerKind:
        rope = rope_to_all if attends_to_all else usual.rope
        return replace(
            usual,
            attention=to_all if attends_to_all else attention,
            rope=rope if rotary else None,
            feed_forward=experts.mixture if mixed and experts is not None else usual.feed_forward,
        )

    found = [
        kind(
            every(number, full_every),
            not every(number, nope_every),
            experts is not None and number > experts.first_dense and every(number, experts.every),
        )
        for number in range(1, layers + 1)
    ]
    return (*found, *[replace(found[-1], mtp=True)] * depth)
