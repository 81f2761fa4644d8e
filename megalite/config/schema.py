"""Every configuration key: its type, its default and what it means.

A key that is a Python keyword (`batch.global`) carries a trailing underscore here (`Batch.global_`) and
none in YAML. Rules that involve several keys are in `rules`.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from megalite.config.layout import Layout

Place = Literal["device", "host", "files"]  # where a tensor lives from step to step
LayerTarget = Literal[
    "query", "key", "value", "attention_output", "query_latent", "latent", "gate", "up", "down", "experts"
]
Target = LayerTarget | Literal["embedding", "head"]
BaseForm = Literal["compute", "nf4"]  # precision of compute, or four bits


def place_of(placement: str) -> Place:
    """The place that a value of `optim.placement` names, which is a folder for states in files."""
    return "device" if placement == "device" else "host" if placement == "host" else "files"


@dataclass
class Run:
    name: str = "run"
    dir: str = "runs"  # run folders are made inside: {dir}/{name}
    seed: int = 0  # initial weights and data order are pure functions of it
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    cluster: str | None = None  # whose step time a run is compared with: a name or file; null: by the GPU's name


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


@dataclass
class Pipeline:
    schedule: str = "1f1b"  # a name of SCHEDULES, or the path of a schedule file
    virtual_stages: int | None = None  # stages per rank; null: as many as the schedule has
    memory: float | None = None  # auto: GiB of activations that a rank may hold; null: as many as 1f1b holds
    split: list[int] | None = None  # layers per stage; null: balanced by cost, embedding and head included
    overlap: bool = True  # dualpipev with parallel.ep: a forward and a backward take turns at computing

    @property
    def stages_per_rank(self) -> int:
        """The number of virtual stages per rank: as configured, or else the schedule's own."""
        return self.virtual_stages or SCHEDULES.get(self.schedule, 1)

    @property
    def searched(self) -> bool:
        """Flag: the order of the schedule is searched for."""
        return self.schedule == "auto"


SCHEDULES = {  # name -> stages per rank
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "zb_h1": 1,
    "zb_h2": 1,
    "zbv": 2,
    "dualpipev": 2,
    "auto": 1,  # or 2, placed in a V
}


@dataclass
class Context:
    method: Literal["ring", "ulysses", "all_gather"] = "ring"  # how attention reaches the other parts of a sequence


DataMode = Literal["ddp", "zero1", "zero2", "zero3"]


@dataclass
class DataParallel:
    """Data parallelism. A rank holds whole: ddp everything, zero1 weights and gradients, zero2 weights, zero3 nothing.

    Under zero1 and ddp gradients are reduced once a step, else after every micro-batch. auto: the first of zero1, zero2
    and zero3 that is predicted to fit the GPU; without one, zero1 on one rank and zero3 on several.
    """

    mode: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    reduce_precision: Literal["fp32", "bf16"] = "fp32"  # gradients on the network, where train.precision is bf16

    @property
    def sharded(self) -> bool:
        """Flag: parameters are divided among data-parallel ranks."""
        return self.mode != "ddp"


Buffers = Literal["exact", "worst_case"]


@dataclass
class ExpertParallel:
    # Rows of tokens at their experts: as many as come, for whose number the host waits in every layer; worst_case: room
    # for as many as can come, and no wait.
    buffers: Buffers = "exact"


@dataclass
class Placement:
    # Home of parameters: host: they are copied to the device ahead of use, and reduced gradients to the host; beside an
    # adapter, only weights that are not trained.
    parameters: Literal["device", "host"] = "device"


@dataclass
class Parallel:
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int | Literal["auto"] = "auto"  # auto: what the world size leaves; 1 without a launcher
    cp: int = 1
    tp: int = 1
    ep: int = 1  # ranks of dp_shard · cp · tp over which the experts of a layer are divided, a multiple of tp
    pipeline: Pipeline = field(default_factory=Pipeline)
    context: Context = field(default_factory=Context)
    data: DataParallel = field(default_factory=DataParallel)
    experts: ExpertParallel = field(default_factory=ExpertParallel)
    placement: Placement = field(default_factory=Placement)

    @property
    def fixed_buffers(self) -> bool:
        """Flag: ranks that share out experts have room for all rows that can come."""
        return self.ep > 1 and self.experts.buffers == "worst_case"

    @property
    def sequence_parts(self) -> int:
        """Equal parts that a sequence must come in: zigzag gives a context-parallel rank two chunks, split over tp."""
        chunks = 2 if self.cp > 1 and self.context.method != "ulysses" else 1
        return chunks * self.cp * self.tp

    @property
    def data_mode(self) -> DataMode:
        """The mode of data parallelism. Where no memory decides what `auto` is: the first of `data_modes` on one rank,
        else zero3."""
        if self.data.mode != "auto":
            return self.data.mode
        return self.data_modes[0] if self.layout.dp * self.layout.cp == 1 else "zero3"

    @property
    def data_modes(self) -> tuple[DataMode, ...]:
        """The modes that `auto` tries one after another. Each sends at least as much as the one before."""
        alone = self.layout.dp * self.layout.cp == 1
        return ("zero3",) if alone and self.placement.parameters == "host" else ("zero1", "zero2", "zero3")

    @property
    def expert_shards(self) -> int:
        """Ranks with the same experts over which their parameters are sharded, once `dp_shard` is a number."""
        return self.layout.dp_shard * self.cp * self.tp // self.ep if self.data.sharded else 1

    @property
    def layout(self) -> Layout:
        """The layout, once `dp_shard` is a number."""
        if not isinstance(self.dp_shard, int):
            raise ValueError("parallel.dp_shard is still 'auto'; resolve the world size first")
        return Layout(self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep)


@dataclass
class Rampup:
    """A global batch that grows linearly in tokens, increment by increment, up to batch.global."""

    start: int = 1  # sequences in the first optimizer step
    increment: int | None = None  # sequences added at a time; null: as many as start
    tokens: int = 0  # tokens of training until batch.global is reached


@dataclass
class Curriculum:
    """Samples cut into shorter sequences, whose length grows linearly in tokens up to model.sequence_length."""

    start: int = 1  # tokens in the first sequences
    tokens: int = 0  # tokens of training until sequences have full length


@dataclass
class Batch:
    """Sizes in sequences of model.sequence_length tokens."""

    micro: int | Literal["auto"] = 1  # sequences in one forward pass of one data-parallel rank; auto: what fits memory
    global_: int = 8  # sequences in one optimizer step of the whole job
    memory: float | None = None  # auto: GiB of a device to fit into; null: what the GPU has
    rampup: Rampup | None = None
    curriculum: Curriculum | None = None

    @property
    def micro_size(self) -> int:
        """`micro`, once it is a number."""
        if not isinstance(self.micro, int):
            raise ValueError("batch.micro is still 'auto'; fit it to a device first")
        return self.micro


@dataclass
class Train:
    steps: int = 100
    # Data type of compute. bf16, fp8: parameters and reductions in fp32. fp8: bf16 but for layers' matrix products.
    precision: Literal["bf16", "fp8", "fp32", "fp64"] = "bf16"
    # Scales of fp8: one for a tensor, for a row of an operand, or for 32 numbers.
    float8_recipe: Literal["tensorwise", "rowwise", "mx"] = "tensorwise"
    recompute: Literal["none", "selective", "full", "budget"] = "none"  # parts of layers that backward runs again
    recompute_every: int = 1  # selective, full: of layers 0, n, 2n, … of every stage
    recompute_budget: float | None = None  # budget: GiB of activations that a rank may keep for backward
    offload_activations: bool = False  # keep layers' activations in host memory from forward to backward
    product: str = "plain"  # layers' matrix products: PyTorch's or MODULE:OBJECT, a `megalite.parallel.product.Product`
    compile: bool = False  # torch.compile each layer
    gc_interval: int = (
        50  # steps between collections of Python's garbage, on all ranks at once; 0: whenever Python likes
    )
    deterministic: bool = False  # the same bits from the same run, also on a GPU, which takes longer
    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"  # where the loss or a gradient is not finite
    max_bad_steps: int = 10  # steps of a run that may be skipped or rolled back
    rollback_skip: int = 1  # global batches left out after a rollback, the last being that of the offending step
    on_spike: Literal["ignore", "warn", "rollback"] = "warn"  # where the loss is far above those before
    spike_window: int = 128  # latest losses that a loss is compared with
    spike_threshold: float = 8.0  # robust standard deviations above their median that make a spike
    timeout: float = 600.0  # seconds without any sign of progress on any rank after which the job ends

    @property
    def dtype(self) -> Literal["bf16", "fp32", "fp64"]:
        """Data type of activations and of gathered weights; in fp8, layers' matrix products alone are different."""
        return "bf16" if self.precision == "fp8" else self.precision


AttentionKernel = Literal["auto", "flash3", "flash4", "cudnn", "flash", "efficient", "flex", "math"]


@dataclass
class Kernels:
    """Kernels of each operation: Triton's, PyTorch's, or those of NVIDIA apex; auto: Triton's on CUDA."""

    rms_norm: Literal["auto", "triton", "torch", "apex"] = "auto"  # with the residual's addition before it
    rope: Literal["auto", "triton", "torch"] = "auto"  # with the norm of queries and keys before it
    swiglu: Literal["auto", "triton", "torch"] = "auto"
    experts: Literal["auto", "triton", "torch"] = "auto"  # SwiGLU of their rows, which are brought to them and back
    cross_entropy: Literal["auto", "triton", "torch"] = "auto"  # with the output layer before it
    adamw: Literal["auto", "triton", "torch", "apex"] = "auto"  # torch: PyTorch's fused one; auto: that without a GPU
    muon: Literal["auto", "triton", "torch"] = "auto"  # passes over memory, and products that are symmetric
    attention: AttentionKernel = "auto"  # see `megalite.config.attention_kernels`; the last, for `all`

    @classmethod
    def all(cls, backend: Any) -> "Kernels":
        """One word for all operations but attention, which has kernels of its own."""
        return cls(*[backend] * (len(fields(cls)) - 1))


@dataclass
class Muon:
    """Settings of `optim.name: muon`; see `megalite.optim.muon`."""

    momentum: float = 0.95
    nesterov: bool = True  # the gradient itself counts once more
    steps: int = 5  # steps of the Newton–Schulz iteration that orthogonalizes an update
    scale: Literal["match_rms_adamw", "spectral"] = "match_rms_adamw"  # with the first, AdamW's rate carries over


@dataclass
class Optim:
    name: Literal["adamw", "muon"] = "adamw"  # muon: of matrices inside of layers, AdamW of all else
    lr: float = 3e-4  # peak learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # decay of matrices only; norms and biases are not decayed
    clip_norm: float = 1.0  # 0: no clipping
    placement: str = "device"  # device, host, or a folder on a drive of each node: the home of the optimizer's states
    update_on: Literal["device", "host"] = "device"  # host: AdamW updates states in host memory there
    muon: Muon = field(default_factory=Muon)

    @property
    def place(self) -> Place:
        """Place of the optimizer's states from step to step."""
        return place_of(self.placement)


@dataclass
class LearningRate:
    name: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    warmup: int = 0  # steps of linear rise to optim.lr
    decay: int | None = None  # wsd: steps of the final linear decay; null: a tenth of train.steps
    floor: float = 0.1  # learning rate at the last step, as a share of optim.lr


@dataclass
class Source:
    path: str = ""  # prefix of a token store, PATH.bin and PATH.idx, or of a list of them, PATH.shards; or its URL
    weight: float = 1.0  # share of tokens, relative to the other sources


@dataclass
class Remote:
    cache: str = "~/.cache/megalite"  # a folder on a local disk, for blocks of stores on servers, and their indices
    cache_size: float = 64.0  # GiB that blocks fill
    timeout: float = 300.0  # seconds that a read is tried again for


@dataclass
class Data:
    train: list[Source] = field(default_factory=list)
    valid: list[Source] = field(default_factory=list)
    tokenizer: str | None = None  # SentencePiece .model or Hugging Face tokenizer.json
    mask_documents: bool = False  # attention stays inside a document of a packed sequence
    reset_positions: bool = False  # positions start anew at every document; needs mask_documents
    end_of_document: int | None = None  # id of the token that ends documents; null: as the tokenizer says
    remote: Remote = field(default_factory=Remote)


@dataclass
class LocalCheckpoint:
    path: str = "/dev/shm"  # a folder that every node has for itself: of its memory, or of a disk of its own
    interval: int = 10  # steps between local checkpoints
    replicas: int = (
        1  # 1: the next node keeps a copy of a node's parts, so that a lost node costs nothing; 0: none does
    )


@dataclass
class Checkpoint:
    interval: int | Literal["auto"] = 0  # steps between checkpoints; 0: only at the end; auto: what loses least time
    keep: int = 2  # newest checkpoints to keep; 0: all
    keep_every: int = 0  # keep those of every n-th step forever; 0: none
    at: list[int] = field(default_factory=list)  # further steps that are saved, and kept forever
    async_: bool = True  # write in the background, from a copy in host memory
    max_failures: int = 3  # checkpoints in a row that may fail to be written before training stops
    resume: str = "auto"  # auto: the newest of this run, if any; never; or the path of a checkpoint
    weights: str | None = None  # path of a checkpoint whose weights a new run begins with
    export: Literal["hf", "peft"] | None = None  # write RUN/export/step-… at the end; hf: the model; peft: the adapter
    export_every: int = 0  # and at every n-th step, a multiple of a fixed interval; 0: only at the end
    export_keep: int = 0  # newest exports to keep; 0: all
    export_url: str | None = None  # a server that a POST tells of every export, such as SGLang or vLLM
    export_timeout: float = 60.0  # seconds that an export is offered to the server; then that is told, and no more
    verify: bool = True  # compare every file with its hash when loading; sizes always are
    local: LocalCheckpoint | None = None  # null, or save on every node first, and copy to the run folder from there


@dataclass
class Log:
    interval: int = 1  # steps between reports
    tensorboard: bool = True
    wandb: str | None = None  # project of Weights & Biases that reports go to as well
    mlflow: str | None = None  # experiment of mlflow that reports go to as well
    prometheus: int | str | None = None  # port, HOST:PORT or file at which Prometheus finds metrics


@dataclass
class Eval:
    interval: int = 0  # steps between evaluations; 0: only at the end
    steps: int = 0  # global batches per evaluation; 0: no evaluation


@dataclass
class Profile:
    start: int = 0  # first step that is recorded, counted from 1; 0: none is
    steps: int = 2  # steps that are recorded
    ranks: list[int] | Literal["all"] = field(default_factory=lambda: [0])  # ranks that record


@dataclass
class Config:
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    adapter: Adapter | None = None  # null: the whole model is trained
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    train: Train = field(default_factory=Train)
    kernels: Literal["auto", "triton", "torch"] | Kernels = "auto"  # kernels of all operations, or of each
    optim: Optim = field(default_factory=Optim)
    schedule: LearningRate = field(default_factory=LearningRate)
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    eval: Eval = field(default_factory=Eval)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        if isinstance(self.model, Model) and self.model.adapter is not self.adapter:  # others may have the model, too
            self.model = replace(self.model)
            self.model.adapter = self.adapter

    def on_host(self, trained: bool) -> bool:
        """Return whether parameters live in host memory, those that are `trained` with their gradients, or others."""
        return self.parallel.placement.parameters == "host" and not (trained and self.adapter is not None)

    @property
    def kernels_by_operation(self) -> Kernels:
        """`kernels` as a section, with every operation."""
        return self.kernels if isinstance(self.kernels, Kernels) else Kernels.all(self.kernels)
