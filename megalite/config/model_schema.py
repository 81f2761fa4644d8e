"""The keys of a model, and of an adapter beside it: types, defaults and what they mean, as in `schema`."""

from dataclasses import dataclass, field
from typing import Literal

LayerTarget = Literal[
    "query", "key", "value", "attention_output", "query_latent", "latent", "gate", "up", "down", "experts"
]
Target = LayerTarget | Literal["embedding", "head"]
BaseForm = Literal["compute", "nf4"]  # precision of compute, or four bits


@dataclass
class RopeScaling:
    """Stretching of RoPE's wavelengths; `megalite.model.positions.frequencies` has the formulas."""

    kind: Literal["llama3", "linear", "yarn", "longrope", "dynamic"] = "llama3"
    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192  # context length before stretching, in tokens
    beta_fast: float = 32.0  # rotations within the original context
    beta_slow: float = 1.0
    truncate: bool = True  # the pairs between which frequencies are interpolated are whole numbers
    attention_factor: float | None = None  # scales cosines and sines; null: it follows from factor
    short_factors: list[float] | None = None  # stretch every pair's wavelength in sequences up to original_length
    long_factors: list[float] | None = None  # and in longer ones
    mscale: float | None = None  # latent attention: sharpens cosines and sines, see `layers.yarn_factor`
    mscale_all_dim: float | None = None  # and scores


SCALING_KEYS = {  # kind -> the keys of RopeScaling that it uses, beside kind and factor
    "llama3": ("low_frequency_factor", "high_frequency_factor", "original_length"),
    "linear": (),
    "yarn": ("original_length", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("original_length", "attention_factor", "short_factors", "long_factors"),
    "dynamic": ("original_length",),
}


@dataclass
class Latent:
    """Latent attention: keys and values are made of a few features of a token (DeepSeek-V2, arXiv 2405.04434, §2.1).

    `model.rotary_width` features of a key are apart from these: they turn, and all heads share them.
    """

    query_rank: int | None = None  # features of which queries are made; null: all of the token's
    key_rank: int = 512  # features of which keys and values are made
    value_width: int = 128  # features of a head's values; queries and keys have model.head_width


@dataclass
class Attention:
    """Attention of all layers, or with `full_every` and `nope_every` of most."""

    window: int | None = None  # tokens that a query attends to, the last being its own; null: all before it
    full_every: int | None = None  # layers n - 1, 2n - 1, … have no window, with 1 none has; null: all have one
    window_rope_theta: float | None = None  # base of RoPE, not stretched, in layers with a window; null: as in others
    scale: float | None = None  # factor of products of queries and keys; null: 1 / √(width of a head)
    softcap: float | None = None  # scores s become softcap · tanh(s / softcap), as in Gemma 2; null: they stay
    sinks: bool = False  # every query head has one more score, learned, of a key whose value is 0, as in gpt-oss
    nope_every: int | None = None  # layers n - 1, 2n - 1, … have no rotary positions, as in SmolLM3; null: all have
    latent: Latent | None = None  # null: grouped-query attention


@dataclass
class Experts:
    """Feed-forwards of which a router chooses a few for every token (arXiv 1701.06538), in all layers or in most."""

    count: int = 8
    active: int = 2  # experts that compute a token
    width: int | None = None  # hidden features of an expert; null: model.ffn
    gate: Literal["swiglu", "clamped"] = "swiglu"  # between an expert's matrices; clamped: as in gpt-oss
    biases: bool = False  # the router and every matrix of an expert have one
    first_dense: int = 0  # layers at the beginning without experts
    every: int = 1  # layers n - 1, 2n - 1, … after them have experts
    scores: Literal["softmax", "sigmoid"] = "softmax"  # how logits of the router become scores
    normalize: bool = True  # the scores of a token's experts are divided by their sum; with softmax, over these alone
    scale: float = 1.0  # factor of scores
    groups: int = 1  # equal runs of experts, of which a token's may be in `active_groups`
    active_groups: int = 1
    correction_rate: float | None = None  # change of a score in the choice by a step, see docs/moe.md; null: none
    shared_width: int | None = None  # hidden features of an expert that computes every token; null: there is none
    shared_gate: bool = False  # its output is multiplied by a score of its own, as in Qwen2-MoE
    balance_loss: float = 0.0  # factor of a loss that is least where a sequence's tokens are shared evenly
    z_loss: float = 0.0  # factor of the mean square of the router's log-sum-exp
    force_balance: bool = False  # tokens take experts in turn, whatever the router says: for measuring speed


@dataclass
class MultiToken:
    """Layers after the last, each of which predicts a token further ahead (DeepSeek-V3, arXiv 2412.19437, §2.2)."""

    depth: int = 1  # layers, each for one token after the next
    weight: float = 0.3  # factor of the mean of their losses, which is added to the training loss


@dataclass
class Base:
    """The sizes at which learning rate, initial weights and decay were chosen; see `parametrization`."""

    width: int | None = None
    layers: int | None = None  # completep: depth is scaled, too
    head_width: int | None = None  # null: the model's own, so that wider models have more heads


@dataclass
class Adapter:
    """Low-rank factors that are trained beside matrices of a model that stays as it is (LoRA, arXiv 2106.09685)."""

    rank: int = 16  # features between the two factors of a matrix
    alpha: float = 32.0  # factor of a pair's product, once divided by the rank
    rslora: bool = False  # it is divided by √rank instead (arXiv 2312.03732)
    dora: bool = False  # also trains the norm of every row of the matrices with their factors (arXiv 2402.09353)
    targets: list[Target] | Literal["all"] = "all"  # matrices that have factors; all: every one of the layers
    dropout: float = 0.0  # share of the features of a layer's input that its factors do not see, another in every token
    base: BaseForm = "compute"  # form of weights that are not trained: nf4: matrices of layers in four bits
    weights: str | None = None  # a run or peft:PATH, with whose factors a new run begins; null: B begins at 0


@dataclass
class Model:
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention
    head_width: int | None = None  # null: width / heads
    ffn: int = 384
    vocab_size: int = 1024
    sequence_length: int = 256  # tokens per training sample
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_width: int | None = None  # features of every head that its position turns; null: all
    norm: Literal["pre", "post", "both"] = "pre"  # before attention and MLP, after them, or both
    norm_eps: float = 1e-5
    norm_gain: Literal["weight", "one_plus_weight"] = "weight"  # factor of what norms return
    activation: Literal["silu", "gelu"] = "silu"  # function of the gate of a feed-forward; gelu: in its tanh form
    tie_embeddings: bool = False  # the output layer uses the embedding's weight
    qk_norm: bool = False  # RMSNorm of queries and keys
    qk_norm_width: Literal["head", "all"] = "head"  # each head by itself, as in Qwen3; all: all together, as in OLMo 2
    qkv_bias: bool = False
    out_bias: bool = False  # a bias of attention's output
    attention: Attention = field(default_factory=Attention)
    experts: Experts | None = None  # null: every layer has one feed-forward, for all tokens
    mtp: MultiToken | None = None  # multi-token prediction; null: only the next token is predicted
    init_std: float = 0.02  # projections into the residual stream use init_std / sqrt(2 · layers)
    parametrization: Literal["standard", "mup", "completep"] = "standard"  # scaling with width, and with depth
    base: Base | None = None  # sizes at which mup and completep have factors of 1
    embedding_multiplier: float = 1.0  # factor of the embedding's output
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None  # logits y become softcap · tanh(y / softcap), as in Gemma 2; null: they stay

    def __post_init__(self) -> None:
        self.adapter: Adapter | None = None  # no key: `Config` hands its own on, as layers are described by their model

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.width // self.heads

    @property
    def rotary_size(self) -> int:
        """Features of one attention head that its position turns."""
        return self.rotary_width or self.head_size

    @property
    def depth(self) -> int:
        """Layers of multi-token prediction, which come after `layers`."""
        return 0 if self.mtp is None else self.mtp.depth

    @property
    def shares_embedding(self) -> bool:
        """Flag: the last stage needs the embedding too, for its head or for multi-token prediction."""
        return self.tie_embeddings or self.mtp is not None

    @property
    def four_bits(self) -> bool:
        """Flag: matrices of layers are kept in four bits, beside an adapter."""
        return self.adapter is not None and self.adapter.base == "nf4"
