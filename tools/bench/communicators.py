"""Simulated steps of pipelines whose messages travel on one communicator of NCCL, or on several.

Exchanges on one communicator run one after the other, so a late one holds back the next. Each column is the mean time
of a step beyond that of the schedule's table, in which no transfer waits for another, with the same costs. `beside` is
the share of compute beside which an exchange runs or waits on the device, on communicators by neighbour. Nothing is
measured: all of this is simulation.

A backward takes two forwards. Jitter J: every action takes up to J more or less than its mean, drawn evenly, and every
stage up to J / 2 throughout a step. A transfer always takes the given share of a forward.
"""

import argparse
import sys
from random import Random
from statistics import fmean

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.schedule.actions import Action, Exchange, Table
from megalite.schedule.communicators import BY_NEIGHBOUR, SPLITS, Communicators
from megalite.schedule.generate import NAMES, build
from megalite.schedule.simulate import cost_of, simulate
from megalite_tools.terminal import Terminal

COMMAND = "python -m megalite_tools.bench.communicators"
MICRO_BATCHES = 4  # micro-batches of a step for each rank


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _main(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], metavar="P", help="default: 4 8")
    shares = "times of a transfer, in forwards of a stage (default: 0.025 0.1)"
    parser.add_argument("--transfers", type=float, nargs="+", default=[0.025, 0.1], metavar="T", help=shares)
    spreads = "spreads of times, from 0 to 1 (default: 0 0.05 0.1)"
    parser.add_argument("--jitters", type=float, nargs="+", default=[0.0, 0.05, 0.1], metavar="J", help=spreads)
    parser.add_argument("--draws", type=int, default=10, metavar="N", help="steps of each kind (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the jitter (default: 0)")
    return parser


def _main(options: argparse.Namespace) -> None:
    _check(options)
    rows = []
    for p in options.ranks:
        for name in NAMES:
            for transfer in options.transfers:
                for jitter in options.jitters:
                    found = compare(build(name, p, MICRO_BATCHES * p), transfer, jitter, options.draws, options.seed)
                    cells = (f"{excess:.2%}" for excess, _ in found.values())
                    beside = f"{found[BY_NEIGHBOUR][1]:.0%}"
                    rows.append((name, f"{p}", f"{transfer:g}", f"{jitter:g}", *cells, beside))
    Terminal().table(("schedule:", "ranks", "transfer", "jitter", *SPLITS, "beside"), rows)


def _check(options: argparse.Namespace) -> None:
    """Raises InputError for options that no step can have."""
    for option, least, most in (("ranks", 1, 64), ("transfers", 0, 100), ("jitters", 0, 1), ("draws", 1, 10_000)):
        given = getattr(options, option)
        for value in given if isinstance(given, list) else [given]:
            if not least <= value <= most:
                raise InputError(f"--{option}={value}: must be from {least} to {most}; leave it out for the default")


def compare(table: Table, transfer: float, jitter: float, draws: int, seed: int) -> dict[str, tuple[float, float]]:
    """By split of transfers among communicators: the mean excess over the table's time, and the mean share beside."""
    clocks = {name: Communicators(table, split) for name, split in SPLITS.items()}
    random, tables = Random(seed), list[float]()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in clocks}
    for _ in range(draws if jitter else 1):
        costs = drawn(table, transfer, jitter, random)
        tables.append(float(simulate(table, costs.__getitem__, transfer).makespan))
        for name, clock in clocks.items():
            found[name].append(clock.run(costs))
    return {
        name: (fmean(time for time, _ in each) / fmean(tables) - 1, fmean(beside for _, beside in each))
        for name, each in found.items()
    }


def drawn(table: Table, transfer: float, jitter: float, random: Random) -> dict[Action, float]:
    """Times of a step's compute and of its transfers, by their sending actions."""
    mean, found = cost_of(table.times), dict[Action, float]()
    stages = [1 + jitter / 2 * random.uniform(-1, 1) for _ in table.placement]
    for program in table.programs:
        for item in program:
            if isinstance(item, Exchange):
                found |= {action.transfer: transfer for action in item.actions}
            else:
                found[item] = float(mean(item)) * stages[item.stage] * (1 + jitter * random.uniform(-1, 1))
    return found


if __name__ == "__main__":
    sys.exit(main())
