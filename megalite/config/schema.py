"""Every configuration key: its type, its default and what it means.

A key that is a Python keyword (`batch.global`) carries a trailing underscore here (`Batch.global_`) and
none in YAML. Rules that involve several keys are in `rules`.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from megalite.config.model_schema import Adapter, Model
from megalite.config.parallel_schema import Parallel

Place = Literal["device", "host", "files"]  # where a tensor lives from step to step


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
    # Scales of fp8: one for a tensor, for a row of an operand, or for 32 numbers of one (mx).
    float8_recipe: Literal["tensorwise", "rowwise", "mx"] = "tensorwise"
    recompute: Literal["none", "selective", "full", "budget"] = "none"  # parts of layers that backward runs again
    recompute_every: int = 1  # selective, full: of layers 0, n, 2n, … of every stage
    recompute_budget: float | None = None  # budget: GiB of activations that a rank may keep for backward
    offload_activations: bool = False  # keep layers' activations in host memory from forward to backward
    product: str = "plain"  # layers' matrix products: PyTorch's or MODULE:OBJECT, a `megalite.parallel.product.Product`
    compile: bool = False  # torch.compile each layer
    cuda_graph: bool = False  # the host launches a micro-batch by one call, see `parallel.graphed`
    gc_interval: int = 50  # steps between collections of Python's garbage, on all ranks at once; 0: as Python likes
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
    replicas: int = 1  # 1: the next node keeps a copy of a node's parts, so that a lost node costs nothing; 0: none


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
    def joins_samples(self) -> bool:
        """Flag: the samples of a micro-batch lie one behind the other in one sequence, `[b·s, 1, …]`.

        They do where attention stays inside of documents: one call of a kernel then takes all of them as they lie.
        Ranks of context parallelism share out every sample, and a balance loss is one of every sample.
        """
        experts = self.model.experts
        balanced = experts is not None and experts.balance_loss > 0
        return self.data.mask_documents and self.parallel.cp == 1 and not balanced

    @property
    def plain_products(self) -> bool:
        """Flag: layers' matrix products are PyTorch's, of weights as they are kept."""
        return self.train.product == "plain" and self.train.precision != "fp8" and not self.model.four_bits

    @property
    def fuses_over_tp(self) -> bool:
        """Flag: products are fused with collectives of tensor parallelism, where GPUs can; see `TensorParallel`.

        CUDA graphs have pieces: no operation on symmetric memory has been captured.
        """
        overlap = self.parallel.tensor.overlap
        of_auto = overlap == "auto" and self.run.device != "cpu" and not self.train.cuda_graph
        asked = overlap == "symmetric" or of_auto
        return self.parallel.tp > 1 and asked and self.plain_products

    @property
    def kernels_by_operation(self) -> Kernels:
        """`kernels` as a section, with every operation."""
        return self.kernels if isinstance(self.kernels, Kernels) else Kernels.all(self.kernels)
