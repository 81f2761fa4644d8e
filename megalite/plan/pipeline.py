"""The pipeline schedule that a configuration asks for."""

from functools import lru_cache
from pathlib import Path

from megalite.base.errors import InputError, Problem
from megalite.config.parallel_schema import SCHEDULES
from megalite.config.schema import Config
from megalite.plan import automatic
from megalite.plan.automatic import Costing, Wanted, check_limit, costs_of, wanted
from megalite.plan.batches import batch_sizes
from megalite.schedule.actions import MAX_ACTIONS, Table, Times
from megalite.schedule.check import check
from megalite.schedule.communication import add_sharding
from megalite.schedule.file import read
from megalite.schedule.generate import AUTO_SCHEDULE, SPLIT_SCHEDULES, actions_of, bubble_of, build, placement_of
from megalite.schedule.orders import first_rounds
from megalite.schedule.simulate import simulate

MAX_LISTED = 8  # problems of a schedule in a message
MIDDLE_STEPS = 5  # steps of a full pipeline, or rounds; more of them hold no more memory


def micro_batches(config: Config) -> int:
    """Number of micro-batches of `batch.global` that every data-parallel rank has."""
    return config.batch.global_ // (config.batch.micro_size * config.parallel.layout.dp)


def fullest_steps(config: Config) -> list[int]:
    """The numbers of micro-batches per step at which a run may reach its peak memory.

    A step with more micro-batches holds at least as much as one with fewer, so the largest step is enough. Under
    interleaved_1f1b this holds only among steps whose first rounds are equally large: there the largest step of each
    such group counts. Under auto every step has an order of its own.
    """
    alone = config.batch.micro_size * config.parallel.layout.dp
    sizes = batch_sizes(config)
    if config.parallel.pipeline.schedule == AUTO_SCHEDULE:
        return [size // alone for size in sizes]
    if config.parallel.pipeline.schedule != "interleaved_1f1b":
        return [sizes[-1] // alone]
    return list({first_rounds(config.parallel.pp, size // alone): size // alone for size in sizes}.values())


def as_full(config: Config, m: int) -> int:
    """A small number of micro-batches with which a step holds as much memory as with `m`.

    A rank holds most when the pipeline is full. From then on the rank repeats the same actions.
    """
    p, pipeline = config.parallel.pp, config.parallel.pipeline
    if pipeline.schedule not in SCHEDULES or pipeline.schedule in ("gpipe", AUTO_SCHEDULE):
        return m  # a file, and an order that was searched, are for one m; gpipe holds all m
    if pipeline.schedule != "interleaved_1f1b":
        return min(m, 3 * p + MIDDLE_STEPS)
    rounds = first_rounds(p, m)
    larger = sum(rounds) - 2 * p
    return min(m, p * (MIDDLE_STEPS + 2) + larger) if rounds[0] <= p + 1 and len(rounds) == 2 else m


def table_of(config: Config, m: int | None = None, costing: Costing | None = None) -> Table:
    """The checked schedule of a training step, with sharding actions if FSDP2 is used.

    m: micro-batches; None: those of `batch.global`. costing: what `auto` searches for, see `automatic.wanted`. Raises
    InputError for a schedule that does not fit the layout, that would deadlock or leave work undone, that is too long
    to be planned, that splits backward passes although torch.compile makes them whole, or for which memory is too
    small.
    """
    pipeline, p = config.parallel.pipeline, config.parallel.pp
    m = m or micro_batches(config)
    mode = sharding_mode(config)
    _refuse_endless(config, m)
    if pipeline.schedule == AUTO_SCHEDULE:
        table = _searched(wanted(config, m, costing), mode)
    else:
        version = None if pipeline.schedule in SCHEDULES else _version(Path(pipeline.schedule))
        times, paired = placing_times(config), pairs_up(config)
        table = _checked(pipeline.schedule, p, m, pipeline.stages_per_rank, times, paired, mode, version)
    if table.splits_backward:
        _refuse_compiled(config)
    return table


def placing_times(config: Config) -> Times | None:
    """Times of stages by which the transfers of a named schedule are placed; None: there are none, or a file says.

    Each exchange of a rank waits for those before it, so they should come in the order in which results are there.
    """
    named = config.parallel.pipeline.schedule in SCHEDULES and config.parallel.pp > 1
    return tuple(stage.times for stage in costs_of(config)) if named else None


def pairs_up(config: Config) -> bool:
    """Return whether a forward and a backward take turns: where one waits for rows of experts, the other computes."""
    pipeline = config.parallel.pipeline
    return pipeline.overlap and can_pair(pipeline.schedule, config.parallel.ep)


def can_pair(schedule: str, ep: int) -> bool:
    """`pairs_up` of a schedule, where `ep` ranks share out experts, if it is wanted."""
    return schedule == "dualpipev" and ep > 1


def _refuse_compiled(config: Config) -> None:
    """Raises InputError if `train.compile` is set: it would make split backward passes whole."""
    if config.train.compile:
        schedule = config.parallel.pipeline.schedule
        rule = f"cannot run with parallel.pipeline.schedule = {schedule}, which splits backward passes"
        fix = "use false, or a schedule whose backward is whole: gpipe, 1f1b or interleaved_1f1b"
        raise InputError([Problem("train.compile", rule, fix, True)])


def placement(config: Config) -> tuple[int, ...]:
    """By stage, the pipeline rank that owns it. Raises InputError for a bad schedule file."""
    pipeline = config.parallel.pipeline
    if pipeline.schedule not in SCHEDULES:
        return table_of(config).placement
    return placement_of(pipeline.schedule, config.parallel.pp, pipeline.stages_per_rank)


def bubble(config: Config, costing: Costing | None = None) -> float:
    """The share of a step of `batch.global` in which ranks idle, if all stages take equally long.

    Where a schedule has times of its own, stages take these; with `auto` what it is searched for counts. costing: as
    for `table_of`. Raises InputError for a bad schedule file.
    """
    pipeline = config.parallel.pipeline
    if pipeline.schedule == AUTO_SCHEDULE:
        return automatic.idle(wanted(config, micro_batches(config), costing))
    if pipeline.schedule not in SCHEDULES:
        return float(simulate(table_of(config)).bubble)
    p, v = config.parallel.pp, pipeline.stages_per_rank
    return float(bubble_of(pipeline.schedule, p, micro_batches(config), v, pairs_up(config)))


def check_schedule(config: Config) -> None:
    """Raises InputError where `table_of` would, without building the table of a named schedule."""
    pipeline = config.parallel.pipeline
    _refuse_endless(config, micro_batches(config))
    if pipeline.schedule not in SCHEDULES:
        table_of(config)
    elif pipeline.schedule == AUTO_SCHEDULE:
        check_limit(config)
    elif pipeline.schedule in SPLIT_SCHEDULES:
        _refuse_compiled(config)


def can_be_planned(config: Config, m: int) -> bool:
    """Return whether the schedule of `m` micro-batches has at most MAX_ACTIONS, counted without building it."""
    return actions(config, m) <= MAX_ACTIONS


def actions(config: Config, m: int) -> int:
    """Number of actions in the schedule of `m` micro-batches, counted without building it; 0 for a file."""
    pipeline = config.parallel.pipeline
    if pipeline.schedule not in SCHEDULES:
        return 0
    return actions_of(pipeline.schedule, config.parallel.pp, m, pipeline.stages_per_rank)


def _refuse_endless(config: Config, m: int) -> None:
    if can_be_planned(config, m):
        return
    stages = config.parallel.pp * config.parallel.pipeline.stages_per_rank
    rule = (
        f"makes {m:,} micro-batches a step, on {stages:,} stages: a pipeline schedule of {actions(config, m):,} "
        f"actions, more than the {MAX_ACTIONS:,} that can be planned"
    )
    fix = (
        "use fewer sequences (this is not a number of tokens), a larger batch.micro, or more data-parallel ranks "
        "(--world-size gives them to parallel.dp_shard = auto)"
    )
    raise InputError([Problem("batch.global", rule, fix, config.batch.global_)])


@lru_cache(maxsize=8)  # tables of large pipelines take seconds to make, and commands ask for one several times
def _checked(
    schedule: str,
    p: int,
    m: int,
    v: int,
    times: Times | None,
    paired: bool,
    mode: str | None,
    version: tuple[int, ...] | None,
) -> Table:
    """`table_of`, cached by everything that the table depends on.

    times: by which transfers are placed. paired: as in `Table`. mode: of data parallelism; None without FSDP2. version:
    of a schedule file, so that a changed file is read again.
    """
    return _ready(build(schedule, p, m, v, times, paired), schedule, mode)


@lru_cache(maxsize=8)
def _searched(wanted: Wanted, mode: str | None) -> Table:
    """The table of `auto`, cached likewise."""
    return _ready(automatic.build(wanted), AUTO_SCHEDULE, mode)


def _ready(table: Table, schedule: str, mode: str | None) -> Table:
    """The table, checked, with the sharding of `mode`; None: without FSDP2."""
    if problems := check(table):
        raise InputError(f"parallel.pipeline.schedule={schedule}: " + "; ".join(problems[:MAX_LISTED]))
    return sharded(table, mode)


def sharded(table: Table, mode: str | None) -> Table:
    """The table with what `mode` gathers and reduces; None: without FSDP2, which does neither."""
    if mode is None:
        return table
    return add_sharding(table, gather=mode != "zero3", reduce_each=mode in ("zero2", "zero3"))


def sharding_mode(config: Config) -> str | None:
    """The data mode of `config`; None without FSDP2."""
    return config.parallel.data_mode if uses_fsdp(config) else None


def of_file(schedule: str) -> Table:
    """The schedule of a file, whatever configuration it is for. Raises InputError for a bad file."""
    return _read(schedule, _version(Path(schedule)))


@lru_cache(maxsize=2)
def _read(schedule: str, version: tuple[int, ...] | None) -> Table:
    """`of_file`, cached likewise."""
    return read(Path(schedule))


def _version(path: Path) -> tuple[int, ...] | None:
    """Values that differ when a file has changed; None for a file that cannot be read, which is reported on reading."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def tables_of(config: Config, costing: Costing | None = None) -> list[Table]:
    """The schedules of `fullest_steps`, shortened by `as_full`; every stage still holds as many micro-batches.

    costing: as for `table_of`.
    """
    return [table_of(config, as_full(config, m), costing) for m in fullest_steps(config)]


def uses_fsdp(config: Config) -> bool:
    """Return whether FSDP2 manages parameters: to shard them, reduce gradients, or free weights after use that are bf16
    or copies of parameters on the host."""
    layout = config.parallel.layout
    return is_managed(config, layout.dp * layout.cp, config.parallel.data_mode)


def is_managed(config: Config, ranks: int, mode: str) -> bool:
    """`uses_fsdp` of `config` in a layout with `ranks` data-parallel ranks and another mode."""
    frees = config.train.dtype == "bf16" or config.parallel.placement.parameters == "host"
    return ranks > 1 or (frees and mode == "zero3")


def uses_copies(config: Config) -> bool:
    """Return whether bf16 copies of parameters are kept beside them, where FSDP2 has nothing else to do."""
    return config.train.dtype == "bf16" and not uses_fsdp(config)
