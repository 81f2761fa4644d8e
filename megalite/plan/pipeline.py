"""The pipeline schedule that a configuration asks for."""

from megalite.config.errors import InputError, Problem
from megalite.config.schema import Config
from megalite.schedule.actions import Table
from megalite.schedule.check import check
from megalite.schedule.generate import build
from megalite.schedule.place import place_sharding

SHOWN = 8  # problems told of one schedule


def micro_batches(config: Config) -> int:
    """Micro-batches of `batch.global` on every data-parallel rank."""
    return config.batch.global_ // (config.batch.micro_size * config.parallel.layout.dp)


def table_of(config: Config, m: int | None = None) -> Table:
    """The schedule of a training step, checked, with sharding where FSDP2 is used.

    m: micro-batches; None: those of `batch.global`. Raises InputError for a schedule that does not fit the layout, that
    would deadlock or leave work undone, or that splits backward passes which torch.compile has made whole.
    """
    pipeline = config.parallel.pipeline
    table = build(pipeline.schedule, config.parallel.pp, m or micro_batches(config), pipeline.stages_per_rank)
    if problems := check(table):
        raise InputError(f"parallel.pipeline.schedule={pipeline.schedule}: " + "; ".join(problems[:SHOWN]))
    if config.train.compile and table.splits_backward:
        rule = f"cannot run with parallel.pipeline.schedule = {pipeline.schedule}, which splits backward passes"
        fix = "use false, or a schedule whose backward is whole: gpipe, 1f1b or interleaved_1f1b"
        raise InputError([Problem("train.compile", rule, fix, True)])
    if not uses_fsdp(config):
        return table
    mode = config.parallel.data.mode
    return place_sharding(table, gather=mode != "zero3", reduce_each=mode in ("zero2", "zero3"))


def uses_fsdp(config: Config) -> bool:
    """Whether FSDP2 manages parameters: to share them out, to reduce gradients, or to compute in another precision."""
    layout = config.parallel.layout
    return layout.dp * layout.cp > 1 or config.train.precision == "bf16"
