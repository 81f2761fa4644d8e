"""The pipeline schedule that a configuration asks for."""

from functools import lru_cache

from megalite.config.errors import InputError, Problem
from megalite.config.schema import SCHEDULES, Config
from megalite.plan.batches import batch_sizes
from megalite.schedule.actions import Table
from megalite.schedule.check import check
from megalite.schedule.generate import build
from megalite.schedule.orders import rounds_of
from megalite.schedule.place import place_sharding

SHOWN = 8  # problems told of one schedule


def micro_batches(config: Config) -> int:
    """Micro-batches of `batch.global` on every data-parallel rank."""
    return config.batch.global_ // (config.batch.micro_size * config.parallel.layout.dp)


def fullest_steps(config: Config) -> list[int]:
    """Micro-batches of the steps of a run of which one holds the most, in bytes or in micro-batches.

    A step of more micro-batches holds as many as one of fewer, or more. But under interleaved_1f1b only if its first
    rounds are as large: then the largest step counts of all that begin alike.
    """
    alone = config.batch.micro_size * config.parallel.layout.dp
    steps = [size // alone for size in batch_sizes(config)]
    if config.parallel.pipeline.schedule != "interleaved_1f1b":
        return steps[-1:]
    return list({tuple(map(len, rounds_of(config.parallel.pp, m)[:2])): m for m in steps}.values())


def table_of(config: Config, m: int | None = None) -> Table:
    """The schedule of a training step, checked, with sharding where FSDP2 is used.

    m: micro-batches; None: those of `batch.global`. Raises InputError for a schedule that does not fit the layout, that
    would deadlock or leave work undone, or that splits backward passes which torch.compile has made whole.
    """
    pipeline, mode = config.parallel.pipeline, config.parallel.data.mode
    make = _checked if pipeline.schedule in SCHEDULES else _checked.__wrapped__  # a file may change
    table = make(
        pipeline.schedule,
        config.parallel.pp,
        m or micro_batches(config),
        pipeline.stages_per_rank,
        mode if uses_fsdp(config) else None,
    )
    if config.train.compile and table.splits_backward:
        rule = f"cannot run with parallel.pipeline.schedule = {pipeline.schedule}, which splits backward passes"
        fix = "use false, or a schedule whose backward is whole: gpipe, 1f1b or interleaved_1f1b"
        raise InputError([Problem("train.compile", rule, fix, True)])
    return table


@lru_cache(maxsize=8)  # tables of large pipelines take seconds to make, and commands ask for one several times
def _checked(schedule: str, p: int, m: int, v: int, mode: str | None) -> Table:
    """mode: of data parallelism, where FSDP2 is used."""
    table = build(schedule, p, m, v)
    if problems := check(table):
        raise InputError(f"parallel.pipeline.schedule={schedule}: " + "; ".join(problems[:SHOWN]))
    if mode is None:
        return table
    return place_sharding(table, gather=mode != "zero3", reduce_each=mode in ("zero2", "zero3"))


def tables_of(config: Config) -> list[Table]:
    """The schedules of `fullest_steps`."""
    return [table_of(config, m) for m in fullest_steps(config)]


def uses_fsdp(config: Config) -> bool:
    """Whether FSDP2 manages parameters: to share them out, to reduce gradients, or to compute in another precision."""
    layout = config.parallel.layout
    return layout.dp * layout.cp > 1 or config.train.precision == "bf16"
