"""Bytes that a program holds on the fullest GPU of a step. Imports no torch.

megalite's own memory is walked through action by action (`plan.memory`). Less is known of other programs, so this adds
up what follows from their code: weights, gradients and optimizer states by how they are sharded; what layers keep for
backward, times the micro-batches that a pipeline rank holds; and what lives for a moment only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite_tools.plan.published.kept_memory import Counted
from megalite_tools.plan.published.layer_counts import stage_layers
from megalite_tools.plan.published.profiles import Profile
from megalite_tools.plan.published.work import Work

HALF_BYTES, FLOAT_BYTES = 2, 4  # bytes of an element in 16 bits, and in float32
ADAM_BYTES = 8  # bytes of AdamW's two moments of a parameter
RESERVATION_FACTOR = 1.13  # bytes that PyTorch's allocator takes from the GPU for one of tensors at their fullest
NON_TENSOR_BYTES = 4.6 * 2**30  # bytes of a GPU that belong to no tensor: CUDA's context, NCCL's buffers, kernels
SPREADS: dict[Counted, float] = {  # half the width of the interval, relative to the estimate, by what is counted
    "allocated": 0.03,
    "formula": 0.03,
    "reserved": 0.13,  # it may be no more than the tensors are
    "device": 0.08,
    "unsaid": 0.10,
}
UNKNOWN_MEMORY_SPREAD = 0.25  # the same of a program of which no profile is known


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors on a pipeline rank at its fullest moment.

    gathered: weights and gradients of layers that zero3 has whole for a while. activations: what layers keep for
    backward. moment: the logits and their gradient, or what one layer's backward needs besides. buffers: of the
    program.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    moment: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def memory(work: Work, program: Profile) -> Memory:
    """Add up the bytes of the fullest pipeline rank: the first, the last, or the first that has more layers."""
    return _fullest(work, program, stage_layers(work, program))


def _fullest(work: Work, program: Profile, layers: Sequence[int]) -> Memory:
    ranks = {0, work.pp - 1, layers.index(max(layers))}
    return max((_rank(work, program, rank, layers[rank]) for rank in ranks), key=lambda found: found.total)


def counted(work: Work, program: Profile, what: Counted) -> float:
    """Predict the bytes that a source publishes.

    allocated: of tensors. reserved: of PyTorch's allocator. device: what nvidia-smi shows. formula: of layers alone,
    as papers add them up. Where a source does not say, tensors are meant.
    """
    if what == "formula":
        # The program still weighs embeddings when it gives layers to ranks.
        found = _fullest(replace(work, vocab=0), program, stage_layers(work, program))
        return found.total - found.moment - found.buffers
    total = memory(work, program).total
    if what == "device":
        return RESERVATION_FACTOR * total + NON_TENSOR_BYTES
    return RESERVATION_FACTOR * total if what == "reserved" else total


def fits(work: Work, program: Profile, size: float) -> bool:
    """Tell whether a step runs on GPUs of `size` bytes. The allocator gives back what it has cached before it fails."""
    return memory(work, program).total <= program.kept.usable * size


def _rank(work: Work, program: Profile, rank: int, layers: int) -> Memory:
    kept = program.kept
    first, last = rank == 0, rank == work.pp - 1
    layer = work.rank_parameters(work.share)
    ends = work.vocab * work.width / work.tp * (2 if first and last and not work.tied else first or last)
    parameters = layers * layer + ends
    shards = (work.shards or work.dp) * work.cp
    weights, gradients, gathered = HALF_BYTES * parameters, kept.gradient * parameters, 0.0
    optimizer = (kept.master + ADAM_BYTES) * parameters / (1 if work.mode == "ddp" else shards)
    if work.mode == "zero3":  # the float32 weights of the optimizer are the weights
        weights, gradients, optimizer = (each * parameters / shards for each in (FLOAT_BYTES, FLOAT_BYTES, ADAM_BYTES))
        if shards > 1:
            gathered = kept.whole * layer + HALF_BYTES * ends
        if work.pp > 1 and kept.accumulates:
            gathered = (HALF_BYTES + FLOAT_BYTES) * parameters
    elif work.mode == "zero2":
        gradients = FLOAT_BYTES * parameters / shards + HALF_BYTES * layer
    elif shards > 1:
        gradients += kept.bucket * parameters
    stream = HALF_BYTES * work.tokens * work.width / (work.tp if program.sequence_parallel else 1)
    each = stream if work.recompute == "full" else layer_kept(work, program)
    held = _held(work, rank)
    activations = held * (layers * each + (stream if kept.outputs and not last else 0))
    vocab = work.vocab / (1 if program.gathers_logits else work.tp)
    logits = kept.logit * work.tokens * vocab if last else 0.0
    moment = max(logits, _backward(work, program))
    return Memory(weights, gradients, optimizer, gathered, activations, moment, kept.buffers)


def _held(work: Work, rank: int) -> float:
    """Micro-batches whose activations a rank has at most, for all of its layers: 1F1B, interleaved with several stages.

    With v stages, the first rank has ((v + 1) p - 1) / v: 1 + (p - 1) / (p v) times the p of one (arXiv 2205.05198).
    """
    after = work.pp - rank - 1
    if work.virtual == 1:
        return min(work.micro_batches, after + 1)
    return min(work.micro_batches * work.virtual, 2 * after + (work.virtual - 1) * work.pp + 1) / work.virtual


def layer_kept(work: Work, program: Profile) -> float:
    """Bytes that a layer keeps of a micro-batch on one rank, unless all of it is recomputed."""
    kept, selective = program.kept, work.recompute == "selective"
    if selective and kept.selective:
        kept = kept.selective
    if work.precision == "fp8" and kept.fp8:
        kept = kept.fp8
    split = work.tp if program.sequence_parallel else 1
    mlp = (kept.gated if work.gated else kept.plain) * work.ffn
    scores = kept.score * work.heads * work.sequence if program.attention == "unfused" and not selective else 0.0
    inside = kept.query * work.q + kept.key * work.k + mlp + scores
    return work.tokens * (work.width * (kept.stream / split + kept.gathered) + inside / work.tp)


def _backward(work: Work, program: Profile) -> float:
    """Bytes that a layer's backward has besides what layers keep: the layer, if it was recomputed, and gradients."""
    again = layer_kept(work, program) if work.recompute == "full" else 0.0
    return again + HALF_BYTES * work.tokens * (3 if work.gated else 2) * work.ffn / work.tp
