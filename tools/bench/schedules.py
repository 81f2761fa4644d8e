"""Orders that `schedule: auto` searches, compared with the named schedules: in simulation, and on sleeping processes.

Simulated: random pipelines with unequal stages, transfers and memory limits (`pipelines`). The order that is found must
never take longer than a named schedule that places stages likewise and keeps to the limits.

Measured: steps of the pipeline runner on four local processes that sleep instead of computing, with the orders of three
pipelines, with the best named schedule of their placement and memory, and with 1f1b on the same layers. The simulations
are given the real lengths of sleeps.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import write_object
from megalite.config.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.ranks import RankInfo
from megalite.schedule.actions import Table
from megalite.schedule.communication import communicate
from megalite.schedule.generate import AUTO_SCHEDULE, build, placement_of
from megalite.schedule.problem import StageCosts
from megalite.schedule.search import search
from megalite.schedule.simulate import simulate
from megalite_tools.bench.pipeline import Sleeps, length_of_sleep, length_of_transfer, runner, timed
from megalite_tools.bench.pipelines import random_case
from megalite_tools.bench.ranks import CPU, run_on_ranks
from megalite_tools.report_file import add_out
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-schedules"
RANKS, MICRO_BATCHES = 4, 12  # ranks and micro-batches of a measured pipeline
MAX_PIPELINE = 8, 32  # ranks and micro-batches of a random pipeline
ROUNDING_FACTOR = 1 + 1e-9  # sums of floats in another order may differ by so much
TOLERANCE = 0.05  # excess of the time of a step over the simulated one, as a share of it


@dataclass(frozen=True)
class MeasuredPipeline:
    """A pipeline to measure. W takes as long as the forward, and I leaves half of what F keeps."""

    name: str
    forwards: tuple[float, ...]  # times of its stages' forwards, in multiples of --unit
    input: float  # how long I takes, in forwards of the stage; 2 with full recompute
    memory: float  # memory of a rank, in micro-batches on all of its stages

    @property
    def stages(self) -> tuple[StageCosts, ...]:
        v = len(self.forwards) // RANKS
        return tuple(StageCosts(f, (1 + self.input) * f, self.input * f, f, 1 / v, 0.5 / v) for f in self.forwards)

    @property
    def placement(self) -> tuple[int, ...]:
        return placement_of(AUTO_SCHEDULE, RANKS, len(self.forwards) // RANKS)

    @property
    def as_1f1b(self) -> tuple[float, ...]:
        """The forwards with one stage on a rank, which has the layers of neighbours in this pipeline."""
        v = len(self.forwards) // RANKS
        return tuple(sum(self.forwards[v * rank : v * (rank + 1)]) for rank in range(RANKS))


PIPELINES = (
    MeasuredPipeline("unequal stages, full recompute", (1.0, 1.3, 0.9, 1.1), 2.0, 4.0),
    MeasuredPipeline("three quarters of 1f1b's memory", (1.2, 0.8, 1.1, 0.9), 1.0, 3.0),
    MeasuredPipeline("two unequal stages on a rank", (1.0, 1.2, 0.8, 1.0, 1.2, 1.0, 0.8, 1.4), 1.5, 4.0),
)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark or, as one of its ranks, measures. Returns the exit code.

    The code is FAILED if an order takes longer than a named schedule, or much longer than simulated.
    """
    return run_on_ranks("megalite_tools.bench.schedules", _parser(), argv, _ranks, _measure, _judge)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="random pipelines to compare (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random pipelines (default: %(default)s)")
    parser.add_argument(
        "--unit", type=float, default=50.0, metavar="MS", help="milliseconds of a sleep (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps of every order (default: %(default)s)")
    add_out(parser, "schedules_cpu.json")
    return parser


def _ranks(options: argparse.Namespace) -> int:
    if options.cases < 1 or options.steps < 1 or not options.unit > 0:
        raise InputError("--cases and --steps must be at least 1, --unit above 0")
    return RANKS


def _measure(rank_info: RankInfo, options: argparse.Namespace, header: dict[str, Any]) -> None:
    found = measure(options.unit / 1000, options.steps)
    if rank_info.rank == 0:
        write_object(Path(options.out), {**header, **found})


def measure(unit: float, steps: int) -> dict[str, Any]:
    """The times of steps of PIPELINES, the same on all ranks. Collective; ranks beyond RANKS get an empty result.

    unit: seconds of a sleep. steps: to time with every order.
    """
    mesh = Mesh.build(Layout(pp=RANKS), CPU)
    if mesh is None:
        return {}
    longer = length_of_sleep(unit, mesh) - unit
    transfer = length_of_transfer(mesh)
    return {
        "ranks": RANKS,
        "micro_batches": MICRO_BATCHES,
        "unit_seconds": unit,
        "sleeps_longer_by_seconds": longer,
        "transfer_seconds": transfer,
        "measured": [_compare(pipeline, mesh, unit, longer, transfer, steps) for pipeline in PIPELINES],
    }


def _compare(
    pipeline: MeasuredPipeline, mesh: Mesh, unit: float, longer: float, transfer: float, steps: int
) -> dict[str, Any]:
    """Seconds per step with the order that is found, and with named schedules; they take turns."""
    placement, stages = pipeline.placement, pipeline.stages
    found = search(placement, MICRO_BATCHES, stages, (pipeline.memory,) * RANKS)
    times = tuple(costs.times for costs in stages)
    tables = {name: build(name, RANKS, MICRO_BATCHES) for name in dict.fromkeys(["1f1b", found.best_named or "1f1b"])}
    tables[AUTO_SCHEDULE] = Table(
        AUTO_SCHEDULE, MICRO_BATCHES, placement, communicate(found.orders, placement, times), times
    )
    sleeps = {
        name: [
            Sleeps(unit * f, unit * f * pipeline.input, unit * f)
            for f in (pipeline.forwards if table.placement == placement else pipeline.as_1f1b)
        ]
        for name, table in tables.items()
    }
    runs = {name: runner(table, mesh, sleeps[name])[0] for name, table in tables.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(-1, steps):  # the first warms up
        for name in list(runs)[:: 1 if step % 2 else -1]:
            taken = timed(runs[name], mesh)
            if step >= 0:
                seconds[name].append(taken)
    return {
        "pipeline": pipeline.name,
        "forwards": pipeline.forwards,
        "input": pipeline.input,
        "memory": pipeline.memory,
        "simulated_seconds": {name: _simulated(tables[name], sleeps[name], longer, transfer) for name in tables},
        "seconds": seconds,
        "time_ratios": {
            name: statistics.median(a / b for a, b in zip(seconds[AUTO_SCHEDULE], seconds[name], strict=True))
            for name in tables
        },
    }


def _simulated(table: Table, sleeps: Sequence[Sleeps], longer: float, transfer: float) -> float:
    real = [Sleeps(s.forward + longer, s.input + longer, s.weight + longer) for s in sleeps]
    times = tuple((s.forward, s.input + s.weight, s.input, s.weight) for s in real)
    return float(
        simulate(Table(table.name, MICRO_BATCHES, table.placement, table.programs, times), None, transfer).makespan
    )


def _judge(options: argparse.Namespace) -> int:
    """Adds the simulated comparison to the report of the ranks, shows it, and tells what is wrong."""
    report = json.loads(Path(options.out).read_text(encoding="utf-8"))
    searches = compare_in_simulation(options.cases, options.seed)
    write_object(Path(options.out), {**report, "searches": searches})
    _show(report["measured"], searches)
    wrong = wrong_in(report["measured"], searches)
    for problem in wrong:
        print(f"{COMMAND}: error: {problem}", file=sys.stderr)
    return ExitCode.FAILED if wrong else ExitCode.DONE


def compare_in_simulation(cases: int, seed: int) -> dict[str, Any]:
    """Gains of searched orders for random pipelines over the best named schedule that keeps to the limits.

    cases: pipelines with such a schedule; others are only counted. A gain is the share saved of the schedule's time.
    """
    random = Random(seed)
    gains: dict[str, list[float]] = {"one stage on a rank": [], "two in a V": []}
    seconds, above, worse, without = list[float](), list[float](), 0, 0
    while sum(map(len, gains.values())) < cases:
        case = random_case(random, *MAX_PIPELINE)
        began = time.perf_counter()
        found = case.search()
        seconds.append(time.perf_counter() - began)
        above.append(found.makespan / found.bound - 1)
        if found.best_named is None:
            without += 1
            continue
        named = found.named[found.best_named]
        gains["one stage on a rank" if len(case.stages) == len(case.limits) else "two in a V"].append(
            1 - found.makespan / named
        )
        worse += found.makespan > named * ROUNDING_FACTOR
    every = [gain for each in gains.values() for gain in each]
    better = [gain for gain in every if gain > ROUNDING_FACTOR - 1]
    return {
        "compared": len(every),
        "no_named_schedule_fits": without,
        "seed": seed,
        "most_ranks_and_micro_batches": MAX_PIPELINE,
        "worse": worse,
        "better": len(better),
        "mean_gain": statistics.fmean(every),
        "mean_gains": {what: statistics.fmean(each) for what, each in gains.items() if each},
        "mean_gain_where_better": statistics.fmean(better) if better else None,
        "largest_gain": max(every),
        "median_above_bound": statistics.median(above),
        "mean_seconds": statistics.fmean(seconds),
        "longest_seconds": max(seconds),
    }


def wrong_in(measured: Sequence[dict[str, Any]], searches: dict[str, Any]) -> list[str]:
    """Problems in the results: an order that takes longer than a named schedule, or than simulated."""
    found = []
    if searches["worse"]:
        found.append(f"{searches['worse']} of {searches['compared']} orders take longer than a named schedule")
    for row in measured:
        if row["time_ratios"]["1f1b"] >= 1:
            found.append(f"{row['pipeline']}: the order takes {row['time_ratios']['1f1b']:.3f} of the time of 1f1b")
        ratio = statistics.median(row["seconds"][AUTO_SCHEDULE]) / row["simulated_seconds"][AUTO_SCHEDULE]
        if ratio > 1 + TOLERANCE:
            found.append(f"{row['pipeline']}: takes {ratio:.3f} of its simulated time, more than {1 + TOLERANCE}")
    return found


def _show(measured: Sequence[dict[str, Any]], searches: dict[str, Any]) -> None:
    terminal, rows = Terminal(), []
    for row in measured:
        for name, seconds in row["seconds"].items():
            simulated, taken = row["simulated_seconds"][name], statistics.median(seconds)
            ratio = "" if name == AUTO_SCHEDULE else f"{row['time_ratios'][name]:.3f}"
            rows.append((row["pipeline"], name, f"{1000 * simulated:.1f}", f"{1000 * taken:.1f}", ratio))
    terminal.table(("pipeline:", "order:", "simulated ms", "ms", "auto / it"), rows)
    for key, value in searches.items():
        terminal.line(f"{key.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    sys.exit(main())
