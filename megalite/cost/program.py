"""Facts of a training program that the time of a layer depends on: fusions, attention, launches. Imports no torch.

Bytes are those that passes over activations read and write; a tensor in bf16 that is read once has 2 for each of its
elements. The defaults are one set for all programs, as fits published runs best.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megalite.config.attention_kernels import Kernel, Machine

Attention = Literal["unfused", "flash1", "flash2", "flash3", "cudnn"]
Dispatch = Literal["all_to_all", "once"]


@dataclass(frozen=True)
class Program:
    """One program.

    Passes over activations, in bytes for each token and element:
        forward, backward: of the residual stream. forward_ffn, backward_ffn: between the MLP's matrices. heads: of
        queries, keys and values, for positions and layouts, forward and backward. scores: of unfused attention's
        scores, forward and backward. logit: of the logits, in the loss and its gradient.
    Attention:
        attention: its kernel; "table": the one that `config/attention_kernels` has for a layer and a GPU.
    Recompute:
        repeats: share of a layer's forward matrix products that selective recompute repeats; None: it repeats
        attention.
    Tensor parallelism:
        sequence_parallel: passes over the residual stream are divided among the ranks. gathers_again: what was gathered
        for a matrix product in forward is gathered once more in backward. hidden: share of the communication that runs
        beside compute. overlaps: collectives run beside matrix products, as those of `parallel.linear` do. rearranges:
        what ranks gather or reduce is copied once, since its parts lie along another axis. gathers_logits: every rank
        has all logits, and computes the whole loss.
    Context parallelism:
        wide_keys: a ring sends gradients of keys and values in float32.
    Experts:
        dispatch: how tokens come to the ranks of their experts: a row for each expert ("all_to_all"), or once to each
        rank that has any of them, and through the network once to each node ("once"). dispatch_overlaps: it runs beside
        the compute of another micro-batch. experts_fp8: their products are in 8 bits where others are. grouped: rate of
        their products, relative to as many of the same sizes in one call. experts_host: seconds that the host takes
        longer for a layer's forward pass with experts. remade_results: full recompute brings results of experts back
        once more, though nothing needs them. load: rows of the busiest rank of ep, in those of the mean.
    Weights:
        optimizer: bytes of a parameter that the optimizer reads and writes.
    The host, in seconds:
        host: in which it launches a layer's forward pass; backward takes HOST_BACKWARD_RATIO times as long. waits: in
        which a layer's forward stands still, since the host reads a result before it goes on.
    Products in 8 bits:
        fp8: their rate relative to what the cluster's file and clocks of bf16 products give: casts of inputs make it
        less, and it is more in that fp8 takes less power. rowwise, mx: the same with a scale for every row, and for
        every 32 numbers. casts: bytes of casts that are passes of their own: in forward for each element that enters a
        product, in backward for that and for each element of a gradient. gathers_fp8: sharded weights, and inputs that
        tensor-parallel ranks gather, are in 8 bits.
    """

    name: str
    attention: Attention | Literal["table"]
    sequence_parallel: bool
    forward: float = 34
    backward: float = 44
    forward_ffn: float = 6
    backward_ffn: float = 10
    heads: tuple[float, float] = (4, 6)
    scores: tuple[float, float] = (9, 11)
    logit: float = 10
    gathers_again: bool = False
    hidden: float = 0.0
    overlaps: bool = False
    repeats: float | None = None
    optimizer: float = 28.0
    host: float = 0.0003
    rearranges: bool = False
    fp8: float = 0.83
    rowwise: float = 0.76  # one H200 took 1.04 times as long as with one scale for a tensor
    mx: float = 0.83  # as `fp8`, until somebody times it; its casts read once instead of twice
    casts: tuple[float, float] = (0, 0)
    gathers_fp8: bool = False
    gathers_logits: bool = False
    wide_keys: bool = False
    waits: float = 0.0
    dispatch: Dispatch = "all_to_all"
    dispatch_overlaps: bool = False
    experts_fp8: bool = False
    grouped: float = 1.0
    experts_host: float = 0.0024
    remade_results: bool = False
    load: float = 1.0


# Bytes are those that kernels declare (`bytes_moved`; a test compares them): norms with the residual's addition move
# four tensors each way, SwiGLU three and five, the loss six; AdamW reads a gradient and updates three float32 tensors,
# for the norm the gradient is read once more. Selective recompute repeats passes, no matrix products.
MEGALITE = Program(
    "megalite",
    attention="table",
    forward=16,
    backward=16,
    forward_ffn=3,
    backward_ffn=5,
    logit=12,
    sequence_parallel=True,
    gathers_again=True,
    overlaps=True,
    repeats=0.0,
    optimizer=32,
    wide_keys=True,
)
HOST_BACKWARD_RATIO = 1.9
# Rows of the busiest rank of ep, in those of the mean, where nothing balances them: steps are then predicted to take
# 1.5 times as long and more. Published pairs are 1.5 to 1.9 times apart (docs/planner_evidence.md, "Experts").
NATURAL_LOAD = 2.0
ATTENTION_SHARES = {  # share of the peak in bf16 that fused attention reaches: forward, backward; by kernel and GPU
    ("flash1", "A100"): (0.36, 0.30),
    ("flash1", "H100"): (0.20, 0.155),
    ("flash2", "A100"): (0.62, 0.53),
    ("flash2", "H100"): (0.34, 0.29),
    ("flash3", "H100"): (0.67, 0.55),
    ("cudnn", "A100"): (0.62, 0.53),
    ("cudnn", "H100"): (0.56, 0.49),
    ("cudnn", "B200"): (0.55, 0.45),
}
DEFAULT_SHARES = (0.34, 0.29)
# Shares of these rates for heads of fewer than WIDE_HEAD_SIZE elements. FlashAttention 1 has one rate for both;
# FlashAttention 2 on H100 reaches 300 instead of 333 TFLOP/s forward, and 260 instead of 287 backward.
NARROW_HEAD_FACTORS: dict[Attention, float] = {"flash1": 1.0, "flash2": 0.9}
DEFAULT_NARROW_FACTOR = 0.75
WIDE_HEAD_SIZE = 128


# Kernels of `config/attention_kernels` that nobody has measured are taken to be as fast as FlashAttention 2.
TABLE_KERNELS: Mapping[Kernel, Attention] = {"flash3": "flash3", "flash4": "flash3", "cudnn": "cudnn"}
# GPUs by a part of their names: compute capabilities, which decide about kernels. MI300X has no cuDNN.
GPUS = {
    "A100": Machine((8, 0)),
    "H100": Machine((9, 0)),
    "H200": Machine((9, 0)),
    "GB300": Machine((10, 3)),
    "B200": Machine((10, 0)),
    "L40S": Machine((8, 9)),
    "4090": Machine((8, 9)),
    "5090": Machine((12, 0)),
    "MI300X": Machine((9, 4), cudnn=0),
}
UNKNOWN_GPU = Machine((8, 0))


def machine_of(gpu: str) -> Machine:
    """The facts that the table of kernels asks of a GPU with this name, with no packages beside PyTorch."""
    return next((machine for name, machine in GPUS.items() if name in gpu), UNKNOWN_GPU)


def attention_shares(kernel: Attention, gpu: str, head_size: int) -> tuple[float, float]:
    """The shares of the peak that a kernel of attention reaches in forward and in backward."""
    kind = next((kind for kind in ("A100", "H100", "H200", "B200", "GB200", "GB300") if kind in gpu), "")
    kind = {"H200": "H100", "GB200": "B200", "GB300": "B200"}.get(kind, kind)
    shares = ATTENTION_SHARES.get((kernel, kind), DEFAULT_SHARES)
    narrow = NARROW_HEAD_FACTORS.get(kernel, DEFAULT_NARROW_FACTOR) if head_size < WIDE_HEAD_SIZE else 1.0
    return shares[0] * narrow, shares[1] * narrow
