"""The pipeline schedule that a configuration asks for."""

from megalite.config.errors import InputError, Problem
from megalite.config.schema import Config
from megalite.schedule.actions import Table
from megalite.schedule.check import check
from megalite.schedule.generate import build

SHOWN = 8  # problems told of one schedule


def micro_batches(config: Config) -> int:
    """Micro-batches of one step on every data-parallel rank."""
    return config.batch.global_ // (config.batch.micro_size * config.parallel.layout.dp)


def table_of(config: Config) -> Table:
    """The schedule of a training step, checked.

    Raises InputError for one that does not fit the layout, that would deadlock or leave work undone, or that splits
    backward passes which torch.compile has made whole.
    """
    pipeline = config.parallel.pipeline
    table = build(pipeline.schedule, config.parallel.pp, micro_batches(config), pipeline.stages_per_rank)
    if problems := check(table):
        raise InputError(f"parallel.pipeline.schedule={pipeline.schedule}: " + "; ".join(problems[:SHOWN]))
    if config.train.compile and table.splits_backward:
        rule = f"cannot run with parallel.pipeline.schedule = {pipeline.schedule}, which splits backward passes"
        fix = "use false, or a schedule whose backward is whole: gpipe, 1f1b or interleaved_1f1b"
        raise InputError([Problem("train.compile", rule, fix, True)])
    return table
