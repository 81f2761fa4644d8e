"""Published runs as configurations of megalite, where one can express them. Imports no torch."""

from dataclasses import replace

from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import DataParallel, Parallel, Pipeline
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Run, Train
from megalite.cost.cluster import Cluster
from megalite_tools.plan.published.layer_counts import stage_layers
from megalite_tools.plan.published.profiles import Profile
from megalite_tools.plan.published.step import StepModel
from megalite_tools.plan.published.work import Work

MAX_OWN_SHARE = 0.03  # share of a step that a program's own ways may change, for a configuration to express it
WEIGHT_BYTES = 2  # bytes of one in bf16


def expressed(work: Work, program: Profile, cluster: Cluster) -> Config | None:
    """The configuration that does `work` as `program` does; None where megalite has none.

    A configuration has SwiGLU, products in 16 bits and fused attention. And it has one way to send and to add up, for
    which `_as_ours` stands: where a program's own ways change its step by more than MAX_OWN_SHARE, no configuration
    expresses it. Tokens go to experts in an all-to-all that nothing hides. Models with several kinds of layers, or with
    latent attention, are left to the formula.
    """
    if len({*work.shares}) > 1 or work.latent or work.predicting or work.rounds > 1:
        return None
    if work.experts and work.ep > 1 and (program.dispatch != "all_to_all" or program.dispatch_overlaps):
        return None
    if work.experts and work.experts.count // work.ep % (work.dp * work.cp * work.tp // work.ep):
        return None  # FSDP2 pads experts to a multiple of the ranks that have the same ones
    if not work.gated or work.precision != "bf16" or program.attention == "unfused":
        return None
    own, ours = (StepModel(work, each, cluster).step().total for each in (program, _as_ours(work, program)))
    if abs(own / ours - 1) > MAX_OWN_SHARE:
        return None
    config = _config(work, program)
    return None if validate(config, work.gpus) else config


def _as_ours(work: Work, program: Profile) -> Profile:
    """The program's profile with its own kernels and fusions, but megalite's communication and overlap.

    Collectives of tensor parallelism are all waited for: a program's own share that is hidden is no configuration's.
    """
    if work.mode in ("zero2", "zero3"):
        moved, sums = (2.0 * WEIGHT_BYTES, float(WEIGHT_BYTES + program.gradient)), 0.0
    else:
        moved, sums = (0.0, 0.0), float(WEIGHT_BYTES + 2 * program.gradient)
    return replace(
        program,
        moved=moved,
        sums=sums,
        sequence_parallel=True,
        gathers_again=True,
        hidden=0.0,
        rearranges=False,
        scatters=True,
        rings=True,
        pieces=1,
        buckets=None,
        all_reduces=False,
        broadcasts=False,
        gathers_logits=False,
        serial=False,
        waits=0.0,
        reduces_beside=True,
        gathers_beside=True,
    )


def _config(work: Work, program: Profile) -> Config:
    shards = 1 if work.mode == "ddp" else work.shards or work.dp
    named = "1f1b" if work.virtual == 1 else "interleaved_1f1b"
    return Config(
        run=Run(device="cuda"),
        model=Model(
            layers=work.layers,
            width=work.width,
            heads=work.heads,
            kv_heads=work.kv_heads,
            head_width=work.head_size,
            ffn=work.ffn,
            vocab_size=work.vocab,
            sequence_length=work.sequence,
            tie_embeddings=work.tied,
            experts=Experts(work.experts.count, work.experts.active, work.experts.width) if work.experts else None,
        ),
        parallel=Parallel(
            pp=work.pp,
            dp_replicate=work.dp // shards,
            dp_shard=shards,
            cp=work.cp,
            tp=work.tp,
            ep=work.ep,
            pipeline=Pipeline(named, work.virtual, split=_split(work, program)),
            data=DataParallel(work.mode, "bf16" if program.gradient == WEIGHT_BYTES else "fp32"),
        ),
        batch=Batch(micro=work.micro, global_=work.micro * work.micro_batches * work.dp),
        train=Train(recompute=work.recompute),
    )


def _split(work: Work, program: Profile) -> list[int] | None:
    """Layers of every stage, first to last, as the program has them; None without a pipeline."""
    if work.pp == 1:
        return None
    return stage_layers(replace(work, pp=work.pp * work.virtual, virtual=1), program)
