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
    bytes that the optimizer reads and writes for a parameter. host: seconds in which the host launches a layer's
    forward pass; backward takes HOST_BACKWARD times as long. scatters: tensor-parallel ranks send a part of a tensor
    each to the next stage. rings: whether collectives use all network adapters of a node, or one. pieces: collectives
    in which the gradients of a layer are reduced. reduces_beside: gradients are reduced while the last backward goes
    on. fp8: share of an fp8 product's rate that is left beside the casts of its inputs. weighs_stages: pipeline ranks
    get layers so that the output layer's parameters are shared out too. kept: what it keeps in memory.
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
    host: float = 0.0003
    scatters: bool = False
    rings: bool = True
    pieces: int = 1
    reduces_beside: bool = False
    fp8: float = 0.83
    weighs_stages: bool = False
    kept: keeps.Kept = keeps.MEGATRON_2025


HOST_BACKWARD = 1.9
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
NARROW = 0.75  # share of these rates for heads of fewer than WIDE elements; FlashAttention 1 has one rate for both
WIDE = 128


def attention_shares(program: Program, gpu: str, head_size: int) -> tuple[float, float]:
    """The shares of the peak that attention reaches in forward and in backward."""
    kind = next((kind for kind in ("A100", "H100", "H200", "B200", "GB200", "GB300") if kind in gpu), "")
    kind = {"H200": "H100", "GB200": "B200", "GB300": "B200"}.get(kind, kind)
    shares = ATTENTION.get((program.attention, kind), OTHER_GPUS)
    narrow = NARROW if head_size < WIDE and program.attention != "flash1" else 1.0
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
    "nanotron": Program(
        "nanotron",
        kept=keeps.NANOTRON,
        attention="flash2",
        pieces=9,
        forward=36,
        backward=44,
        forward_ffn=5,
        backward_ffn=8,
        logit=16,
        reduces_beside=True,
        weighs_stages=True,  # src/nanotron/models/base.py: get_block_compute_costs
        sequence_parallel=True,
        gathers_again=True,
    ),
    "megatron_2025": MEGATRON_2025,
    # NeMo's user guide, "Communication Overlap": tensor-parallel communication is pipelined with matrix products or is
    # beside them; gradients are reduced in bf16 beside backward. That four fifths are hidden is an assumption.
    "nemo": replace(MEGATRON_2025, name="NeMo", kept=keeps.NEMO, gradient=2, hidden=0.8, reduces_beside=True),
}
