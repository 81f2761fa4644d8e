"""Pipeline schedules by name: an order of compute actions, then the transfers that it needs."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from megalite.base.errors import InputError, counted
from megalite.config.rules.parallel import SCHEDULE_FILES
from megalite.schedule.actions import Orders, Table, Times
from megalite.schedule.communication import communicate
from megalite.schedule.file import read
from megalite.schedule.orders import forward_only, gpipe, interleaved, one_f_one_b
from megalite.schedule.zero_bubble import dualpipev, zb_h1, zb_h2, zbv

ONE_STAGE_SCHEDULES: dict[str, Callable[[int, int], Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}
V_SCHEDULES: dict[str, Callable[[int, int], Orders]] = {"zbv": zbv, "dualpipev": dualpipev}
SPLIT_SCHEDULES = ("zb_h1", "zb_h2", "zbv", "dualpipev")  # backward into the two halves, I and W
AUTO_SCHEDULE = "auto"  # not one of NAMES: `search` makes it for given costs, and places stages as these do
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipev")


def build(name: str, p: int, m: int, v: int | None = None, times: Times | None = None, paired: bool = False) -> Table:
    """The schedule `name`, one of NAMES or the path of a file, for p pipeline ranks and m micro-batches.

    v: virtual stages per rank; None: as many as the schedule has, which is 2 for interleaved_1f1b. times: of stages, by
    which transfers of a named schedule are placed, as in `communicate`. paired: as in `Table`, for a named schedule.
    "forward" is evaluation with one stage per rank. Raises InputError for an unknown name, a size that the schedule
    cannot have, or a bad file.
    """
    if p >= 1 and m >= 1 and name.endswith(SCHEDULE_FILES):
        return _from_file(name, p, m, v)
    if p >= 1 and m >= 1 and name == "forward":
        return build_forward(range(p), m)
    placement, orders = orders_of(name, p, m, v)
    return Table(name, m, placement, communicate(orders, placement, times, paired), paired=paired)


def orders_of(name: str, p: int, m: int, v: int | None = None) -> tuple[tuple[int, ...], Orders]:
    """The placement and the compute of `build`'s schedule `name`, one of NAMES, without transfers."""
    if p < 1 or m < 1:
        raise InputError(f"a pipeline needs at least 1 rank and 1 micro-batch, not {p} and {m}")
    if name not in NAMES:
        raise InputError(
            f"parallel.pipeline.schedule={name!r} is unknown; choose one of {', '.join(NAMES)}, "
            f"or the path of a schedule file that ends in {' or '.join(SCHEDULE_FILES)}"
        )
    if name == "interleaved_1f1b":
        v = 2 if v is None else v
        if v < 1:
            raise InputError(f"parallel.pipeline.virtual_stages={v}: must be at least 1")
        return placement_of(name, p, v), interleaved(p, m, v)
    stages = 2 if name in V_SCHEDULES else 1
    if v not in (None, stages):
        raise InputError(
            f"parallel.pipeline.schedule={name!r} has {stages} stage{'s' * (stages > 1)} per rank, "
            f"not {v} virtual stage{'s' * (v != 1)}"
        )
    return placement_of(name, p, stages), {**ONE_STAGE_SCHEDULES, **V_SCHEDULES}[name](p, m)


def placement_of(name: str, p: int, v: int) -> tuple[int, ...]:
    """By stage: the rank that owns it under the schedule `name`, in NAMES or AUTO_SCHEDULE, with v stages per rank."""
    return (*range(p), *reversed(range(p))) if _is_v(name, v) else tuple(range(p)) * v


def actions_of(name: str, p: int, m: int, v: int) -> int:
    """The number of actions of the schedule `name`, one of NAMES or AUTO_SCHEDULE, without sharding.

    For dualpipev and AUTO_SCHEDULE it is an upper bound, as they may leave some backwards whole.
    """
    stages = p * v
    turn = 1 if _is_v(name, v) else 0  # turns of a V, where a result stays on its rank
    moved = 0 if p == 1 else stages - 1 - turn
    return m * (stages * (3 if name in (*SPLIT_SCHEDULES, AUTO_SCHEDULE) else 2) + 4 * moved)


def _is_v(name: str, v: int) -> bool:
    return name in V_SCHEDULES or (name == AUTO_SCHEDULE and v == 2)


def bubble_of(name: str, p: int, m: int, v: int, paired: bool = False) -> Fraction:
    """The bubble of the schedule `name`, one of NAMES, at UNIT costs: `simulate(build(name, p, m, v)).bubble`.

    paired: as in `Table`. Results of a pair come later, which prolongs a ramp.

    A rank computes 3·m·v units of time. It idles during the ramps at both ends of a step, and longer where there are
    too few micro-batches to fill the pipeline.
    """
    ramp, missing = p - 1, max(0, p - m)
    idle = {
        "interleaved_1f1b": 3 * (ramp + missing * (v - 1)),
        "zb_h1": ramp + missing,
        "zb_h2": ramp + missing,
        "zbv": max(ramp, 4 * p - 2 * m - 2),
        "dualpipev": max(ramp, 5 * p - 2 * (m - (m > p)) - 3),
    }.get(name, 3 * ramp) + paired * (m > p) * ramp
    return Fraction(idle, idle + 3 * m * v)


def build_forward(placement: Sequence[int], m: int) -> Table:
    """The schedule of an evaluation, on the stages of a training schedule with this placement."""
    return Table("forward", m, tuple(placement), communicate(forward_only(placement, m), placement))


def _from_file(path: str, p: int, m: int, v: int | None) -> Table:
    table = read(Path(path))
    wrong = []
    if table.ranks != p:
        wrong.append(f"for {counted(table.ranks, 'rank')}, not parallel.pp={p}")
    if table.micro_batches != m:
        wrong.append(
            f"for {counted(table.micro_batches, 'micro-batch', 'micro-batches')}, not {m}; batch.global must be "
            f"{table.micro_batches} · batch.micro · data-parallel ranks"
        )
    if v is not None and table.stages != p * v:
        per_rank, rest = divmod(table.stages, p)
        fix = "" if rest else f"; use virtual_stages {per_rank}"
        wrong.append(
            f"for {counted(table.stages, 'stage')}, not parallel.pp · parallel.pipeline.virtual_stages = {p * v}{fix}"
        )
    if wrong:
        raise InputError(f"parallel.pipeline.schedule={path!r}: the schedule of this file is {', and '.join(wrong)}")
    return table
