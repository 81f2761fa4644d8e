"""Bytes that training programs keep in memory, as far as they differ from one to the next. Imports no torch.

Bytes are those that a program's code keeps from forward to backward: a tensor in bf16 has 2 for each of its elements,
and dropout's mask has 1. Files named here are in the programs' repositories.
"""

from dataclasses import dataclass, replace
from typing import Literal

USABLE_SHARE = 0.9
EXPANDABLE_SHARE = 0.95  # with an allocator whose segments grow, so that less of its memory is in pieces
Counted = Literal["allocated", "reserved", "device", "formula", "unsaid"]


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that one program keeps. Bytes without a unit are for each token of a micro-batch and element of the tensor.

    stream: the residual stream's copies, divided among tensor-parallel ranks if the program has sequence parallelism.
    gathered: such copies that every tensor-parallel rank keeps in full. query: queries and attention's result. key:
    keys and values, for each element of the keys. gated: between the matrices of a gated MLP; plain: of one with two
    matrices. score: for each score of unfused attention. logit: for each logit, when the loss has most. gradient: for
    each parameter, its gradients as long as micro-batches are added up. master: for each parameter, what the optimizer
    has of its float32 value. bucket: for each parameter, copies of its
    gradient for data-parallel ranks to exchange. whole: for each parameter of a layer, what zero3 has of it together.
    accumulates: zero3 keeps weights and float32 gradients whole through a pipeline's step. outputs: pipeline ranks keep
    what they sent. buffers: bytes of a rank, whatever its model. selective, fp8: the same facts for selective
    recompute, and for products in fp8. usable: share of a GPU's memory that tensors can have before a step fails.
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
    master: float = 4
    bucket: float = 0
    whole: float = 10
    accumulates: bool = False
    outputs: bool = False
    buffers: float = 0
    selective: "KeptBytes | None" = None
    fp8: "KeptBytes | None" = None
    usable: float = USABLE_SHARE
    counts: Counted = "unsaid"


# The defaults, and two masks of dropout: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1.
MEGATRON_2021 = KeptBytes(stream=10)
# Gradients stay in 16 bits; logits are cast to float32 for the loss (megatron/model/gpt_model.py). Two
# buckets of 5e8 elements: deepspeed/runtime/zero/config.py, reduce_bucket_size and allgather_bucket_size. Published
# memory grows with micro-batches, so pipeline ranks keep their outputs.
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021, gradient=2, logit=14, whole=4, outputs=True, buffers=2 * 2 * 5e8, counts="device"
)
# Megatron-DeepSpeed with a sum of gradients in float32 beside those in 16 bits: deepspeed/runtime/bf16_optimizer.py.
DEEPSPEED_FLOAT32_SUM = replace(MEGATRON_DEEPSPEED, gradient=6)
# In fp8, Transformer Engine keeps the inputs of products in 8 bits: results of both norms, of attention and of the
# activation (transformer_engine/pytorch/module/layernorm_linear.py and layernorm_mlp.py, save_for_backward).
MEGATRON_2025 = KeptBytes(fp8=KeptBytes(stream=6, query=5, gated=5, plain=3))
# scripts/performance sets grad_reduce_in_fp32 = False, "bf16 grad dtype"; recipes of Megatron-Bridge set
# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
NEMO = replace(MEGATRON_2025, gradient=2, usable=EXPANDABLE_SHARE)
# The optimizer of NeMo 2.0 and before has the lower half of float32 weights only, as the weights are the upper half:
# nemo/collections/nlp/models/language_modeling/megatron_base_model.py, store_param_remainders.
NEMO_2024 = replace(NEMO, master=2)
# The result of every second matrix product is kept, and attention's: torchtitan/distributed/activation_checkpoint.py,
# "op". The loss is in float32: the log-softmax, its gradient, and that of the logits. In pipelines FSDP2 gathers once
# in a step (torchtitan/models/llama3/parallelize.py: reshard_after_forward). The report: components/metrics.py.
# SDPA keeps rotated queries and keys, values and its result; rotations keep nothing (models/llama/model.py).
TORCHTITAN = KeptBytes(
    gated=8,
    logit=12,
    accumulates=True,
    selective=KeptBytes(stream=4, query=4, key=2, gated=2, plain=2),
    counts="reserved",
)
# A compiled layer does not keep the result of its last product, which backward does not need.
COMPILED_TORCHTITAN = replace(TORCHTITAN, gated=6, selective=KeptBytes(stream=2, query=4, key=2, gated=2, plain=2))
# Its code is not public. It must make the product of gate and up again, since the run fits into 8,192 GPUs of 80 GB
# without recomputing more (arXiv 2407.21783, section 3.3.2).
LLAMA_3 = replace(MEGATRON_2025, gated=4)
# From 2025 on, the loss is compiled too: logits and their gradient in bf16 (torchtitan/components/loss.py).
TORCHTITAN_2025 = replace(COMPILED_TORCHTITAN, logit=4)
# src/nanotron/models/llama.py: SiLU's result beside gate and up, attention's result once more in the order of the
# stream, logits in bf16 and twice in float32. src/nanotron/optim/gradient_accumulator.py: float32 sums beside gradients
# in bf16; DistributedDataParallel has its buckets. The published memory shows that inputs are kept gathered.
NANOTRON = KeptBytes(stream=4, gathered=4, query=6, gated=8, logit=10, gradient=6, bucket=2)
# The loss of flash_attn keeps logits in bf16, and so is their gradient: llmfoundry/models/mpt/modeling_mpt.py.
LLM_FOUNDRY = KeptBytes(logit=4)
# Gradients are added up in bf16; the loss of flash_attn works in place: internlm/model/losses/ce_loss.py. Buckets of
# 512 MiB: hybrid_zero_optimizer in configs/7B_sft.py.
INTERNEVO = KeptBytes(gated=8, gradient=2, logit=4, buffers=2 * 512 * 2**20)
# One tensor has queries, keys and values; views of it keep it beside rotated queries and keys
# (core/nn/attention/attention.py of github.com/Aleph-Alpha/scaling at 737f855). SiLU's result is kept (mlp.py), and
# masks of dropout. Logits count in bf16, in float32 (cross_entropy.py), as their log-softmax, as two gradients, one of
# them in bf16 too, and as the bf16 ones of the micro-batch before in one of two buffers (pipeline_schedule/train.py).
SCALING = KeptBytes(stream=10, query=6, key=6, gated=8, gradient=2, logit=18, outputs=True)
NORM_BYTES = 4  # bytes of both norms' results, a part of `stream`
EAGER_NORM_BYTES = 8  # bytes that norms keep more where each operation keeps its inputs: two in float32 and two in bf16
# Usual in PyTorch: logits in bf16, in float32, their log-softmax, and its gradient.
UNKNOWN_PROGRAM = replace(MEGATRON_2025, logit=14)
UNKNOWN_SHARDED_PROGRAM = replace(TORCHTITAN, logit=14, counts="unsaid")
