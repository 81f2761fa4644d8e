"""The profiles of training programs, read off their code and papers. Imports no torch."""

from dataclasses import dataclass, replace

from megalite.cost.program import Program
from megalite_tools.plan.published import kept_memory as keeps

UNKNOWN_SPREAD = 0.35  # half the width of the interval of a step of a program that has no profile, relative to it


@dataclass(frozen=True, kw_only=True)
class Profile(Program):
    """Facts of one published program: those that the time of a layer depends on, and these.

    Data parallelism:
        gradient: bytes of a gradient that is reduced. pieces: collectives in which the gradients of a layer are
        reduced. buckets: bytes of 16-bit gradients that are reduced at once where none are sharded. rings: collectives
        use all network adapters of a node, not one. reduces_beside: gradients are reduced while the last backward goes
        on. gathers_beside: the first forward goes on while weights are gathered. all_reduces: gradients are summed on
        all ranks, also where their states are sharded. broadcasts: each rank sends the weights that it has updated to
        all others, one after another.
    Weights and their gradients, in bytes for each parameter:
        moved: that forward and backward of a micro-batch read and write besides the products: copies of what is
        gathered and reduced, sums of gradients. sums: such bytes of backward, but for the first micro-batch of a step.
    Pipelines:
        scatters: tensor-parallel ranks send a part of a tensor each to the next stage. serial: a rank sends and
        receives one tensor after another, and computes nothing meanwhile. weighs_stages: ranks get layers so that the
        output layer's parameters are shared out too. balances: they get layers so that the largest rank has as few
        parameters as can be, those of the embedding and the output layer included.
    known: its code or papers were read; predictions for another program have a wider interval. kept: what it keeps in
    memory.
    """

    gradient: int = 4
    pieces: int = 1
    buckets: float | None = None
    rings: bool = True
    reduces_beside: bool = False
    gathers_beside: bool = False
    all_reduces: bool = False
    broadcasts: bool = False
    moved: tuple[float, float] = (0, 0)
    sums: float = 0
    scatters: bool = False
    serial: bool = False
    weighs_stages: bool = False
    balances: bool = False
    known: bool = True
    kept: keeps.KeptBytes = keeps.MEGATRON_2025


# FSDP2 copies what it has gathered into parameters, 2 bytes read and 2 written, in both passes; gradients in bf16
# become the float32 buffer of a reduce-scatter: foreach_all_gather_copy_out and foreach_reduce_scatter_copy_in in
# torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, both on the stream that computes. FSDP1 gathers into views;
# backward joins gradients to one flat tensor, which is divided before it is reduced: _flat_param.py, and
# _post_backward_hook in _runtime_utils.py, both in torch/distributed/fsdp.
FSDP2 = (4, 4 + 6)
FSDP1 = (0, 4 + 4)
FUSED_SUM = (0, 6)  # a product adds to float32 gradients: 8 bytes instead of 2 (--gradient-accumulation-fusion)
FLOAT32_SUM = (0, 10)  # gradients in 16 bits are read, and float32 sums read and written
# Two norms that PyTorch computes operation by operation in float32, as the reference code of LLaMA does, beyond one
# kernel each: casts, square, mean, two products, and their gradients; forward, backward.
EAGER_NORMS = (68, 156)
# A softmax that PyTorch computes operation by operation in bf16: a clone, the mask, a softmax that reads long rows
# three times, dropout; forward, backward.
EAGER_SOFTMAX = (22, 20)
# A loss after a cast to float32 moves 52 bytes of a logit (megatron/mpu/cross_entropy.py), in plain kernels that are
# faster than most passes: seconds of stages by vocabulary (github.com/sail-sg/VocabularyParallelism at 6191c3b,
# artifact/exp_one_host.csv) come to 36 to 39 at the usual rate.
CAST_BYTES = 38
# Rate of experts' products with PyTorch's own functions around them, relative to those of Transformer Engine: sorting,
# gathers and scatters by index. No published run tells products and these from each other.
TORCH_GROUPED = 0.174
# Megatron-LM of 2021 and 2022: layer norms, bias + dropout + residual and bias + GELU are fused; attention is not.
MEGATRON_2021 = Profile(
    "Megatron-LM 2021",
    kept=keeps.MEGATRON_2021,
    attention="unfused",
    forward_ffn=4,
    backward_ffn=6,
    logit=CAST_BYTES,
    sequence_parallel=False,
    gradient=2,
    sums=6,  # in 16 bits
    host=0.0003,
    scatters=True,
)
TORCHTITAN = Profile(
    "torchtitan with torch.compile",
    kept=keeps.COMPILED_TORCHTITAN,
    attention="flash2",
    sequence_parallel=True,
    gathers_again=True,
    repeats=0.5,
    moved=FSDP2,
    grouped=TORCH_GROUPED,
    # torchao: compiled kernels find the maximum of what they make, a cast reads 2 bytes and writes 1; backward reads
    # gradients twice, and has inputs cast and transposed again.
    fp8=1.0,
    casts=(3, 5),
    # torchao/float8/float8_tensor_parallel.py casts before it gathers; train_configs/llama3_405b.toml has
    # enable_fsdp_float8_all_gather.
    gathers_fp8=True,
    rearranges=True,  # Shard(1): all_gather_tensor in torch/distributed/_functional_collectives.py joins chunks
)
MEGATRON_2025 = Profile(
    "Megatron-LM with Transformer Engine",
    attention="cudnn",
    sequence_parallel=True,
    gathers_again=True,
    scatters=True,
    moved=FUSED_SUM,
    fp8=1.0,  # Transformer Engine casts in the kernels that make a product's inputs
    remade_results=True,  # CheckpointFunction in megatron/core/tensor_parallel/random.py runs all of forward
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
    experts_fp8=True,
)


def with_eager_norms(program: Profile) -> Profile:
    """The program with norms that no kernel fuses."""
    forward, backward = program.forward + EAGER_NORMS[0], program.backward + EAGER_NORMS[1]
    kept = replace(program.kept, stream=program.kept.stream + keeps.EAGER_NORM_BYTES)
    return replace(program, forward=forward, backward=backward, kept=kept)


def with_sequence_parallelism(program: Profile) -> Profile:
    """A program that keeps what it has gathered: the results of norms, which other ranks have parts of. Between stages
    each rank sends its own part of the stream. One that has sequence parallelism anyway stays as it is."""
    if program.sequence_parallel:
        return program
    stream, gathered = program.kept.stream - keeps.NORM_BYTES, program.kept.gathered + keeps.NORM_BYTES
    kept = replace(program.kept, stream=stream, gathered=gathered)
    return replace(program, sequence_parallel=True, gathers_again=False, scatters=True, kept=kept)


PROFILES = {
    "megatron_2021": MEGATRON_2021,
    "megatron_2022": replace(MEGATRON_2021, name="Megatron-LM 2022", sequence_parallel=True, gathers_again=True),
    # It sends parts: deepspeed/runtime/pipe/engine.py, is_pipe_partitioned. The engine goes through a list of
    # instructions for every micro-batch, which its host takes. Its runs show fewer bytes of a logit than Megatron-LM's;
    # for most of them the vocabulary is not published.
    "megatron_deepspeed": replace(
        MEGATRON_2021,
        name="Megatron-DeepSpeed",
        kept=keeps.MEGATRON_DEEPSPEED,
        host=0.00083,
        logit=10,
    ),
    "deepspeed_zero3": replace(
        MEGATRON_2021, name="DeepSpeed ZeRO-3 of 2021", kept=keeps.MEGATRON_DEEPSPEED, rings=False
    ),
    "llm_foundry": Profile(
        "llm-foundry",
        kept=keeps.LLM_FOUNDRY,
        attention="flash1",
        sequence_parallel=False,
        gradient=2,
        moved=FSDP1,
    ),
    "torchtitan": replace(with_eager_norms(TORCHTITAN), name="torchtitan", kept=keeps.TORCHTITAN),
    "torchtitan_compiled": TORCHTITAN,
    "torchtitan_2025": replace(
        TORCHTITAN,
        name="torchtitan of 2025 with torch.compile",
        kept=keeps.TORCHTITAN_2025,
    ),
    "nanotron": Profile(
        "nanotron",
        kept=keeps.NANOTRON,
        attention="flash2",
        forward_ffn=4,
        backward_ffn=6,
        # Whole gradients are summed a bucket of DDP at a time: all_reduce_coalesced in
        # src/nanotron/optim/gradient_accumulator.py, ddp_bucket_cap_mb. The published times show that
        # reduce_scatter_coalesced takes each parameter by itself.
        pieces=9,
        buckets=25 * 2**20,
        reduces_beside=True,
        weighs_stages=True,  # src/nanotron/models/base.py: get_block_compute_costs
        sequence_parallel=True,
        gathers_again=True,
        moved=FLOAT32_SUM,  # src/nanotron/optim/gradient_accumulator.py
    ),
    "fms_fsdp": replace(
        TORCHTITAN,
        name="fms-fsdp",
        gradient=2,
        moved=FSDP1,
        gathers_fp8=False,
    ),
    # The code of 2023: the fusions of 2021, with sequence parallelism and FlashAttention 2.
    "megatron_2023": replace(
        MEGATRON_2021,
        name="Megatron-LM 2023",
        attention="flash2",
        sequence_parallel=True,
        gathers_again=True,
        gradient=4,
        moved=FLOAT32_SUM,
        sums=0,
    ),
    # The code of 2023 (c18bec9). Gradients in bf16 are all-reduced beside backward, and each rank
    # broadcasts the weights that it has updated (solver/optimizer/hybrid_zero_optim.py: _reduce_grads_by_rank,
    # broadcast_params). FlashAttention 1.0.5: doc/en/install.md.
    "internevo": Profile(
        "InternEvo",
        kept=keeps.INTERNEVO,
        attention="flash1",
        sequence_parallel=False,
        gradient=2,
        sums=6,
        reduces_beside=True,
        all_reduces=True,
        broadcasts=True,
    ),
    # Code of 2024 (737f855), for runs of 2023. Positions are applied operation by operation (core/nn/rotary.py). The
    # output layer joins all logits (lm_head.py), and the loss casts them (cross_entropy.py). Gradients are added up in
    # bf16 and all-reduced in float32 (optimizer/allreduce.py). Without sequence parallelism each of three
    # column-parallel products reduces its input's gradient. Lengths of documents are read back to the host for every
    # layer's attention (attention.py, get_max_seq_length). The published times show that stages are balanced
    # by their parameters.
    "scaling": Profile(
        "Aleph Alpha Scaling",
        kept=keeps.SCALING,
        attention="flash2",
        heads=(18, 28),
        logit=CAST_BYTES,
        sequence_parallel=False,
        gathers_again=True,
        gradient=4,
        sums=6,
        all_reduces=True,
        gathers_logits=True,
        balances=True,
        serial=True,
        waits=0.0004,
    ),
    # Transformer Engine's layers and grouped products, sharded by FSDP2 (docs/performance-summary.mdx).
    "automodel": replace(TORCHTITAN, name="NeMo AutoModel", attention="cudnn", grouped=1.0),
    "megatron_2025": MEGATRON_2025,
    "llama_3": replace(MEGATRON_2025, name="Meta's of Llama 3", kept=keeps.LLAMA_3, reduces_beside=True),
    "nemo": NEMO,
    # Transformer Engine prefers cuDNN's attention on H100 (github.com/NVIDIA/NeMo/pull/9188). With the cuDNN of early
    # 2024, which releases up to July have, it is as fast as FlashAttention 2, as the times of long sequences show.
    "nemo_2024": replace(NEMO, name="NeMo of 2024", attention="flash2", fp8=0.92, kept=keeps.NEMO_2024),
    "nemo_late_2024": replace(NEMO, name="NeMo of late 2024", fp8=0.92, kept=keeps.NEMO_2024),
    # Usual in PyTorch: FlashAttention 2, fused norms, little else, and a loss in float32.
    "unknown": replace(
        MEGATRON_2025,
        name="an unknown program",
        kept=keeps.UNKNOWN_PROGRAM,
        attention="flash2",
        fp8=TORCHTITAN.fp8,
        casts=TORCHTITAN.casts,
        known=False,
    ),
    "unknown_sharded": replace(
        TORCHTITAN,
        name="an unknown program that shards weights",
        kept=keeps.UNKNOWN_SHARDED_PROGRAM,
        gathers_fp8=False,
        known=False,
    ),
}
