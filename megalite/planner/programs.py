"""Training programs, as far as their speed depends on them: what they fuse, keep, overlap and launch.

A published time is that of a program, so it is predicted with the program's profile. Bytes are those that passes over
activations read and write, counted from the kernels that the program runs; a tensor in bf16 that is read once has 2 for
each of its elements.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megalite.planner import kept as keeps

Attention = Literal["unfused", "flash1", "flash2", "flash3", "cudnn"]


@dataclass(frozen=True)
class Program:
    """One program.

    forward, backward: bytes of passes over a layer's activations, for each token and element of the residual stream.
    forward_ffn, backward_ffn: for each token and element between the MLP's matrices. logit: for each logit, in the loss
    and its gradient. sequence_parallel: passes over the residual stream are divided among tensor-parallel ranks.
    gathers_again: what was gathered for a matrix product in forward is gathered once more in backward. hidden: share of
    tensor-parallel communication that runs beside compute. repeats: share of a layer's forward matrix products that
    selective recompute repeats; None: it repeats attention. gradient: bytes of a gradient that is reduced. optimizer:
    bytes that the optimizer reads and writes for a parameter. moved: bytes that forward and backward of a micro-batch
    read and write for a parameter besides the products: copies of what is gathered and reduced, sums of gradients.
    sums: such bytes of backward, but for the first micro-batch of a step. host: seconds in which the host launches a
    layer's forward pass; backward takes HOST_BACKWARD times as long. scatters: tensor-parallel ranks send a part of a
    tensor each to the next stage. rings: whether collectives use all network adapters of a node, or one. pieces:
    collectives in which the gradients of a layer are reduced. buckets: bytes of 16-bit gradients that are reduced at
    once where none are sharded. reduces_beside: gradients are reduced while the last backward goes on. gathers_beside:
    the first forward goes on while weights are gathered. rearranges: what tensor-parallel ranks gather or reduce is
    copied once, since its parts lie along another axis. fp8: rate of fp8 products relative to what the cluster's file
    and clocks of bf16 products give: casts of inputs make it less, and it is more in that fp8 takes less power. casts:
    bytes of casts that are passes of their own: in forward for each element that enters a product, in backward for that
    and for each element of a gradient. weighs_stages: pipeline ranks get layers so that the output layer's parameters
    are shared out too. all_reduces: gradients are summed on all ranks, also where their states are sharded. broadcasts:
    each rank sends the weights that it has updated to all others, one after another. gathers_fp8: sharded weights, and
    inputs that tensor-parallel ranks gather, are in 8 bits where products are in fp8. known: its code or papers were
    read; predictions for another program have a wider interval. kept: what it keeps in memory.
    """

    name: str
    attention: Attention
    forward: float
    backward: float
    forward_ffn: float
    backward_ffn: float
    logit: float
    sequence_parallel: bool
    gathers_again: bool = False
    hidden: float = 0.0
    repeats: float | None = None
    gradient: int = 4
    optimizer: float = 28.0
    moved: tuple[float, float] = (0, 0)
    sums: float = 0
    host: float = 0.0003
    scatters: bool = False
    rings: bool = True
    pieces: int = 1
    buckets: float | None = None
    reduces_beside: bool = False
    gathers_beside: bool = False
    rearranges: bool = False
    fp8: float = 0.83
    casts: tuple[float, float] = (0, 0)
    weighs_stages: bool = False
    all_reduces: bool = False
    broadcasts: bool = False
    gathers_fp8: bool = False
    known: bool = True
    kept: keeps.Kept = keeps.MEGATRON_2025


HOST_BACKWARD = 1.9
# FSDP2 copies what it has gathered into parameters, 2 bytes read and 2 written, in both passes; gradients in bf16
# become the float32 buffer of a reduce-scatter: foreach_all_gather_copy_out and foreach_reduce_scatter_copy_in in
# torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, both on the stream that computes. FSDP1 gathers into views;
# backward joins gradients to one flat tensor, which is divided before it is reduced: _flat_param.py, and
# _post_backward_hook in _runtime_utils.py, both in torch/distributed/fsdp.
FSDP2 = (4, 4 + 6)
FSDP1 = (0, 4 + 4)
FUSED = (0, 6)  # a product adds to float32 gradients: 8 bytes instead of 2 (--gradient-accumulation-fusion)
TO_FLOAT32 = (0, 10)  # gradients in 16 bits are read, and float32 sums read and written
ATTENTION = {  # share of the peak in bf16 that fused attention reaches: forward, backward; by kernel and GPU
    ("flash1", "A100"): (0.36, 0.30),
    ("flash1", "H100"): (0.20, 0.155),
    ("flash2", "A100"): (0.62, 0.53),
    ("flash2", "H100"): (0.34, 0.29),
    ("flash3", "H100"): (0.67, 0.55),
    ("cudnn", "A100"): (0.62, 0.53),
    ("cudnn", "H100"): (0.56, 0.49),
    ("cudnn", "B200"): (0.55, 0.45),
}
OTHER_GPUS = (0.34, 0.29)
# Shares of these rates for heads of fewer than WIDE elements. FlashAttention 1 has one rate for both; FlashAttention 2
# on H100 reaches 300 instead of 333 TFLOP/s forward, and 260 instead of 287 backward.
NARROW: dict[Attention, float] = {"flash1": 1.0, "flash2": 0.9}
NARROWEST = 0.75
WIDE = 128


def attention_shares(program: Program, gpu: str, head_size: int) -> tuple[float, float]:
    """The shares of the peak that attention reaches in forward and in backward."""
    kind = next((kind for kind in ("A100", "H100", "H200", "B200", "GB200", "GB300") if kind in gpu), "")
    kind = {"H200": "H100", "GB200": "B200", "GB300": "B200"}.get(kind, kind)
    shares = ATTENTION.get((program.attention, kind), OTHER_GPUS)
    narrow = NARROW.get(program.attention, NARROWEST) if head_size < WIDE else 1.0
    return shares[0] * narrow, shares[1] * narrow


# Megatron-LM of 2021 and 2022: layer norms, bias + dropout + residual and bias + GELU are fused; attention is not.
MEGATRON_2021 = Program(
    "Megatron-LM 2021",
    kept=keeps.MEGATRON_2021,
    attention="unfused",
    forward=32,
    backward=32,
    forward_ffn=4,
    backward_ffn=6,
    logit=24,
    sequence_parallel=False,
    gradient=2,
    sums=6,  # in 16 bits
    host=0.0003,
    scatters=True,
)
TORCHTITAN = Program(
    "torchtitan",
    kept=keeps.TORCHTITAN,
    attention="flash2",
    forward=60,
    backward=70,
    forward_ffn=12,
    backward_ffn=20,
    logit=24,
    sequence_parallel=True,
    gathers_again=True,
    repeats=0.5,
    moved=FSDP2,
    # torchao: compiled kernels find the maximum of what they make, a cast reads 2 bytes and writes 1; backward reads
    # gradients twice, and has inputs cast and transposed again.
    fp8=1.0,
    casts=(3, 5),
    # torchao/float8/float8_tensor_parallel.py casts before it gathers; train_configs/llama3_405b.toml has
    # enable_fsdp_float8_all_gather.
    gathers_fp8=True,
    rearranges=True,  # Shard(1): all_gather_tensor in torch/distributed/_functional_collectives.py joins chunks
)
# Bytes are those that kernels declare (`bytes_moved`; a test compares them): norms with the residual's addition move
# four tensors each way, SwiGLU three and five, the loss six; AdamW reads a gradient and updates three float32 tensors,
# for the norm the gradient is read once more. Selective recompute repeats passes, no matrix products.
MEGALITE = Program(
    "megalite",
    attention="flash2",
    forward=16,
    backward=16,
    forward_ffn=3,
    backward_ffn=5,
    logit=12,
    sequence_parallel=True,
    gathers_again=True,
    repeats=0.0,
    optimizer=32,
    scatters=True,
    reduces_beside=True,
)
MEGATRON_2025 = Program(
    "Megatron-LM with Transformer Engine",
    attention="cudnn",
    forward=26,
    backward=34,
    forward_ffn=6,
    backward_ffn=10,
    logit=10,
    sequence_parallel=True,
    gathers_again=True,
    scatters=True,
    moved=FUSED,
    fp8=1.0,  # Transformer Engine casts in the kernels that make a product's inputs
)
# NeMo's user guide, "Communication Overlap": tensor-parallel communication is pipelined with matrix products or beside
# them; gradients are reduced in bf16 beside backward, and weights gathered beside forward. The share that is hidden is
# not published: of tenths, 0.8 leaves least bias on the rows of NVIDIA's tables with tensor parallelism.
NEMO = replace(
    MEGATRON_2025,
    name="NeMo",
    kept=keeps.NEMO,
    gradient=2,
    hidden=0.8,
    reduces_beside=True,
    gathers_beside=True,
    moved=(0, 2),
)
PROGRAMS = {
    "megatron_2021": MEGATRON_2021,
    "megatron_2022": replace(MEGATRON_2021, name="Megatron-LM 2022", sequence_parallel=True, gathers_again=True),
    "megatron_deepspeed": replace(  # it sends parts: deepspeed/runtime/pipe/engine.py, is_pipe_partitioned
        MEGATRON_2021, name="Megatron-DeepSpeed", kept=keeps.MEGATRON_DEEPSPEED, host=0.00088
    ),
    "deepspeed_zero3": replace(
        MEGATRON_2021, name="DeepSpeed ZeRO-3 of 2021", kept=keeps.MEGATRON_DEEPSPEED, rings=False
    ),
    "llm_foundry": Program(
        "llm-foundry",
        kept=keeps.LLM_FOUNDRY,
        attention="flash1",
        forward=40,  # the residual stream stays in float32: llmfoundry/models/layers/norm.py casts it for every norm
        backward=56,
        forward_ffn=4,
        backward_ffn=6,
        logit=24,
        sequence_parallel=False,
        gradient=2,
        optimizer=60,
        moved=FSDP1,
        host=0.00035,
    ),
    "torchtitan": TORCHTITAN,
    "torchtitan_compiled": replace(
        TORCHTITAN,
        name="torchtitan with torch.compile",
        kept=keeps.TORCHTITAN_COMPILED,
        forward=24,
        backward=30,
        forward_ffn=8,
        backward_ffn=12,
    ),
    "torchtitan_2025": replace(
        TORCHTITAN,
        name="torchtitan of 2025 with torch.compile",
        kept=keeps.TORCHTITAN_2025,
        forward=24,
        backward=30,
        forward_ffn=8,
        backward_ffn=12,
        logit=12,
    ),
    "nanotron": Program(
        "nanotron",
        kept=keeps.NANOTRON,
        attention="flash2",
        # Whole gradients are summed a bucket of DDP at a time: all_reduce_coalesced in
        # src/nanotron/optim/gradient_accumulator.py, ddp_bucket_cap_mb. That reduce_scatter_coalesced takes each
        # parameter by itself is told by published times.
        pieces=9,
        buckets=25 * 2**20,
        forward=30,
        backward=36,
        forward_ffn=4,
        backward_ffn=6,
        logit=16,
        reduces_beside=True,
        weighs_stages=True,  # src/nanotron/models/base.py: get_block_compute_costs
        sequence_parallel=True,
        gathers_again=True,
        moved=TO_FLOAT32,  # src/nanotron/optim/gradient_accumulator.py
    ),
    "fms_fsdp": replace(
        TORCHTITAN,
        name="fms-fsdp",
        forward=24,
        backward=30,
        forward_ffn=8,
        backward_ffn=12,
        gradient=2,
        moved=FSDP1,
        gathers_fp8=False,
    ),
    # Of 2023: the fusions of 2021, with sequence parallelism and FlashAttention 2.
    "megatron_2023": replace(
        MEGATRON_2021,
        name="Megatron-LM 2023",
        attention="flash2",
        sequence_parallel=True,
        gathers_again=True,
        gradient=4,
        moved=TO_FLOAT32,
        sums=0,
    ),
    # Of 2023 (c18bec9). Residuals are cast to float32 for norms of apex (internlm/model/modeling_internlm.py); SiLU and
    # its product are two kernels (linear.py). Gradients in bf16 are all-reduced beside backward, and each rank
    # broadcasts the weights that it has updated (solver/optimizer/hybrid_zero_optim.py: _reduce_grads_by_rank,
    # broadcast_params). FlashAttention 1.0.5: doc/en/install.md.
    "internevo": Program(
        "InternEvo",
        kept=keeps.INTERNEVO,
        attention="flash1",
        forward=36,
        backward=44,
        forward_ffn=5,
        backward_ffn=9,
        logit=8,
        sequence_parallel=False,
        gradient=2,
        sums=6,
        optimizer=126,  # torch.optim.AdamW, operation by operation; gradients joined, cast and clipped before
        reduces_beside=True,
        all_reduces=True,
        broadcasts=True,
    ),
    "megatron_2025": MEGATRON_2025,
    # --tp-comm-overlap, --overlap-grad-reduce and --overlap-param-gather
    "megatron_overlap": replace(
        MEGATRON_2025,
        name="Megatron-LM with overlap",
        attention="flash2",
        hidden=0.8,
        reduces_beside=True,
        gathers_beside=True,
    ),
    "llama_3": replace(MEGATRON_2025, name="Meta's of Llama 3", kept=keeps.LLAMA_3, reduces_beside=True),
    "nemo": NEMO,
    # Transformer Engine prefers cuDNN's attention on H100 (github.com/NVIDIA/NeMo/pull/9188). With the cuDNN of early
    # 2024, which releases up to July have, it is as fast as FlashAttention 2, as the times of long sequences tell.
    "nemo_2024": replace(NEMO, name="NeMo of 2024", attention="flash2", fp8=0.92, kept=keeps.NEMO_2024),
    "nemo_late_2024": replace(NEMO, name="NeMo of late 2024", fp8=0.92, kept=keeps.NEMO_2024),
    # What is usual in PyTorch: FlashAttention 2, fused norms, little else, and a loss in float32.
    "unknown": replace(
        MEGATRON_2025,
        name="an unknown program",
        kept=keeps.UNKNOWN,
        attention="flash2",
        forward=36,
        backward=44,
        logit=24,
        fp8=TORCHTITAN.fp8,
        casts=TORCHTITAN.casts,
        known=False,
    ),
    "unknown_sharded": replace(
        TORCHTITAN,
        name="an unknown program that shards weights",
        kept=keeps.UNKNOWN_SHARDED,
        gathers_fp8=False,
        known=False,
    ),
}
