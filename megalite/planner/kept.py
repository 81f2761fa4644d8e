"""What training programs keep in memory, as far as it differs from one to the next. Imports no torch.

Bytes are those that a program's code keeps from forward to backward: a tensor in bf16 has 2 for each of its elements,
and dropout's mask has 1. Files named here are in the programs' repositories.
"""

from dataclasses import dataclass, replace
from typing import Literal

Counted = Literal["allocated", "reserved", "device", "formula", "unsaid"]


@dataclass(frozen=True)
class Kept:
    """What one program keeps. Bytes without a unit are for each token of a micro-batch and element of the tensor.

    stream: the residual stream's copies, divided among tensor-parallel ranks if the program has sequence parallelism.
    gathered: such copies that every tensor-parallel rank keeps in full. query: queries and attention's result. key:
    keys and values, for each element of the keys. gated: between the matrices of a gated MLP; plain: of one with two
    matrices. score: for each score of unfused attention. logit: for each logit, when the loss has most. gradient: for
    each parameter, its gradients as long as micro-batches are added up. bucket: for each parameter, copies of its
    gradient for data-parallel ranks to exchange. whole: for each parameter of a layer, what zero3 has of it together.
    accumulates: zero3 keeps weights and float32 gradients whole through a pipeline's step. outputs: pipeline ranks keep
    what they sent. buffers: bytes of a rank, whatever its model. selective: the same facts for selective recompute.
    counts: which bytes the program reports.
    """

    stream: float = 8  # inputs and results of two norms
    gathered: float = 0
    query: float = 4
    key: float = 4
    gated: float = 6  # gate, up, and their product
    plain: float = 4  # before and after the activation
    score: float = 5  # the softmax's result, what dropout returns, and its mask
    logit: float = 6
    gradient: float = 4
    bucket: float = 0
    whole: float = 10
    accumulates: bool = False
    outputs: bool = False
    buffers: float = 0
    selective: "Kept | None" = None
    counts: Counted = "unsaid"


# The defaults, and two masks of dropout: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1.
MEGATRON_2021 = Kept(stream=10)
# Gradients stay in 16 bits; logits are cast to float32 for the loss (megatron/model/gpt_model.py). Two
# buckets of 5e8 elements: deepspeed/runtime/zero/config.py, reduce_bucket_size and allgather_bucket_size. That pipeline
# ranks keep what they sent is told by how the published memory grows with micro-batches.
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021, gradient=2, logit=14, whole=4, outputs=True, buffers=2 * 2 * 5e8, counts="device"
)
# The same with a sum of gradients in float32 beside them: deepspeed/runtime/bf16_optimizer.py.
DEEPSPEED_FLOAT32_SUM = replace(MEGATRON_DEEPSPEED, gradient=6)
MEGATRON_2025 = Kept()
# scripts/performance sets grad_reduce_in_fp32 = False, "bf16 grad dtype".
NEMO = Kept(gradient=2)
# Of every second matrix product the result is kept, and attention's: torchtitan/distributed/activation_checkpoint.py,
# "op". The loss is in float32: the log-softmax, its gradient, and that of the logits. In pipelines FSDP2 gathers once
# in a step (torchtitan/models/llama3/parallelize.py: reshard_after_forward). The report: components/metrics.py.
TORCHTITAN = Kept(
    query=6,
    key=6,
    gated=8,
    logit=12,
    accumulates=True,
    selective=Kept(stream=4, query=4, key=2, gated=2, plain=2),
    counts="reserved",
)
# A compiled layer does not keep the result of its last product, which backward does not need.
TORCHTITAN_COMPILED = replace(TORCHTITAN, gated=6, selective=Kept(stream=2, query=4, key=2, gated=2, plain=2))
# src/nanotron/models/llama.py: SiLU's result beside gate and up, attention's result once more in the order of the
# stream, logits in bf16 and twice in float32. src/nanotron/optim/gradient_accumulator.py: float32 sums beside gradients
# in bf16; DistributedDataParallel has its buckets. That inputs are kept gathered is told by the published memory.
NANOTRON = Kept(stream=4, gathered=4, query=6, gated=8, logit=10, gradient=6, bucket=2)
# The loss of flash_attn keeps logits in bf16, and so is their gradient: llmfoundry/models/mpt/modeling_mpt.py.
LLM_FOUNDRY = Kept(logit=4)
