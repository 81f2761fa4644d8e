"""The self-check: predicted memory and traffic of chosen pipeline ranks, beside what dry runs of the real code count.

Each dry run is a process of its own, which runs one rank of the whole layout on this machine, without a GPU and without
the other ranks. Predictions are made for what is run there, as `plan.dry` tells.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from megalite.base.errors import InputError, listing
from megalite.base.exit_codes import ExitCode
from megalite.base.terminal import console, sections, table
from megalite.commands.show.memory import dry_run, fullest, split_otherwise
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.dry_run.configuration import as_counted, busiest_rank
from megalite.plan.memory.fit import fitted
from megalite.plan.memory.held import HOST_MEMORY, OUTSIDE_KINDS
from megalite.plan.memory.peak import KINDS, Memory, memory_of_ranks
from megalite.plan.parts.transfers import Traffic, Transfer
from megalite.plan.resolved import resolve
from megalite.plan.traffic.step import step_traffic
from megalite_launch.base.texts import BINARY_UNITS, scaled

TOLERANCE = 0.01  # share of the memory counted in all, on the device and on the host
LISTED_TRANSFERS = 8  # the most transfers that differ which are listed


@dataclass(frozen=True)
class RankCheck:
    """One rank's prediction and what was counted."""

    rank: int
    memory: Memory
    bytes: dict[str, int]  # by kind
    doing: str  # at the peak of what was counted
    traffic: Sequence[Traffic]
    transfers: Counter[Transfer]
    micro_batches: int  # micro-batches of the step that was counted

    @property
    def predicted(self) -> Counter[Transfer]:
        found: Counter[Transfer] = Counter()
        for traffic in self.traffic:
            found[traffic.transfer] += traffic.times
        return found

    @property
    def memory_agrees(self) -> bool:
        outside = ((sum(self.memory.of(kind).values()), self.bytes.get(kind, 0)) for kind in OUTSIDE_KINDS)
        return _near(self.memory.total, _on_device(self.bytes)) and all(_near(*both) for both in outside)

    @property
    def traffic_agrees(self) -> bool:
        return self.predicted == self.transfers


def run(args: argparse.Namespace, ranks: Sequence[int] | None = None) -> int:
    """Prints the self-check of a configuration. Returns DONE if all ranks agree, else FAILED.

    Memory agrees if its sum is within TOLERANCE; traffic only if every transfer is as large and as frequent as
    predicted, over the same axis.

    args: `files`, `overrides`, and `world_size`, the number of ranks or None. ranks: pipeline ranks to check; None: the
    first, the last, and the one that needs most memory. Raises InputError for a bad configuration, for a pipeline rank
    that there is not, and for a dry run that would take too long or fails.
    """
    config = check(load(args.files, args.overrides), args.world_size)
    config = fitted(config, costing=costing_of(config))
    checked = [_check(args, config, memory) for memory in _chosen(config, ranks)]
    parts = [part for each in checked for part in _parts(each)]
    sections(console(), [*parts, ("Self-check", _verdict(checked))])
    return ExitCode.DONE if all(each.memory_agrees and each.traffic_agrees for each in checked) else ExitCode.FAILED


def _chosen(config: Config, ranks: Sequence[int] | None) -> list[Memory]:
    """The predicted memory of the pipeline ranks to check."""
    memories = memory_of_ranks(as_counted(config), costing_of(config))
    wanted = {0, len(memories) - 1, fullest(memories).pp} if ranks is None else set(ranks)
    if unknown := sorted(wanted - set(range(len(memories)))):
        last = len(memories) - 1
        raise InputError(f"pipeline rank {listing(unknown, 'and')}: there is none; parallel.pp has ranks 0 to {last}")
    return [memories[pp] for pp in sorted(wanted)]


def _check(args: argparse.Namespace, config: Config, memory: Memory) -> RankCheck:
    found = dry_run(args, config, memory, "--dry-run", "leave --dry-run out")
    rank, m = busiest_rank(config, memory.pp), found["micro_batches"]
    traffic = step_traffic(resolve(as_counted(config), costing=costing_of(config)), rank, m)
    transfers = Counter({Transfer(*key): times for *key, times in found["transfers"]})
    return RankCheck(rank, memory, found["bytes"], found["doing"], traffic, transfers, m)


def _parts(checked: RankCheck) -> list[tuple[str, RenderableType]]:
    pp, m, full = checked.memory.pp, checked.micro_batches, checked.memory.micro_batches
    part = f", in a step of {m} micro-batches of {full}, which reach the peak" if m < full else ""
    moments = f"Peak predicted: {checked.memory.instant}.\nPeak counted: while the rank did {checked.doing}."
    notes = Text(moments + split_otherwise(checked.memory, checked.bytes))
    found: list[tuple[str, RenderableType]] = [
        (f"Memory of pipeline rank {pp} (rank {checked.rank})", _memory_table(checked)),
        (f"Moment of the peak of pipeline rank {pp}", notes),
        (f"Traffic of pipeline rank {pp} (rank {checked.rank}){part}", _traffic_table(checked)),
    ]
    if not checked.traffic_agrees:
        found.append((f"Transfers of pipeline rank {pp} that differ", _differences(checked)))
    return found


def _memory_table(checked: RankCheck) -> Table:
    shown = table("", "predicted", "counted", "difference", text=("",))
    for kind in (*KINDS, *OUTSIDE_KINDS):
        predicted, counted = sum(checked.memory.of(kind).values()), checked.bytes.get(kind, 0)
        if kind == HOST_MEMORY and (predicted or counted):
            shown.add_section()
        if predicted or counted:
            shown.add_row(kind, *_both(predicted, counted))
        if kind == KINDS[-1]:
            shown.add_row("total", *_both(checked.memory.total, _on_device(checked.bytes)), style="bold")
    return shown


def _both(predicted: int, counted: int) -> tuple[str, str, str]:
    difference = f"{predicted / counted - 1:+.2%}" if counted else ""
    return scaled(predicted, "B", BINARY_UNITS), scaled(counted, "B", BINARY_UNITS), difference


def _traffic_table(checked: RankCheck) -> Table:
    """A row for each kind and axis, followed by the predicted purposes; what is counted has no purpose."""
    shown = table("", "ranks", "transfers", "counted", "bytes", "counted", text=("",))
    sizes = {traffic.axis: traffic.ranks for traffic in checked.traffic}
    both = {(transfer.kind, transfer.axis) for transfer in (*checked.predicted, *checked.transfers)}
    for kind, axis in sorted(both, key=lambda of: (of[1], of[0])):
        predicted, counted = (_sum(found, kind, axis) for found in (checked.predicted, checked.transfers))
        numbers = (f"{predicted[0]:,}", f"{counted[0]:,}", f"{predicted[1]:,}", f"{counted[1]:,}")
        shown.add_row(f"{axis}: {kind}", str(sizes.get(axis, "")), *numbers, style="bold")
        purposes = Counter[str]()
        totals = Counter[str]()
        for traffic in checked.traffic:
            if (traffic.kind, traffic.axis) == (kind, axis):
                purposes[traffic.purpose] += traffic.times
                totals[traffic.purpose] += traffic.total
        for purpose, times in purposes.items():
            shown.add_row(f"  {purpose}", "", f"{times:,}", "", f"{totals[purpose]:,}", "")
    return shown


def _sum(found: Counter[Transfer], kind: str, axis: str) -> tuple[int, int]:
    """Return the number of transfers of a kind over an axis, and their bytes."""
    of = {transfer: times for transfer, times in found.items() if (transfer.kind, transfer.axis) == (kind, axis)}
    return sum(of.values()), sum(transfer.bytes * times for transfer, times in of.items())


def _differences(checked: RankCheck) -> Table:
    shown = table("transfer", "bytes", "type", "predicted", "counted", text=("transfer", "type"))
    predicted, counted = checked.predicted, checked.transfers
    differing = [each for each in predicted | counted if predicted[each] != counted[each]]
    for each in differing[:LISTED_TRANSFERS]:
        times = f"{predicted[each]:,}", f"{counted[each]:,}"
        shown.add_row(f"{each.axis}: {each.kind}", f"{each.bytes:,}", each.dtype, *times)
    if len(differing) > LISTED_TRANSFERS:
        shown.add_row(f"and {len(differing) - LISTED_TRANSFERS} more", "", "", "", "")
    return shown


def _verdict(checked: Sequence[RankCheck]) -> Text:
    memory = [each.memory.pp for each in checked if not each.memory_agrees]
    traffic = [each.memory.pp for each in checked if not each.traffic_agrees]
    if not memory and not traffic:
        return Text(f"passed: memory within {TOLERANCE:.0%}, traffic equal transfer by transfer.", style="green")
    said = [f"memory is off by more than {TOLERANCE:.0%} on pipeline rank {listing(memory, 'and')}"] if memory else []
    said += [f"traffic differs on pipeline rank {listing(traffic, 'and')}"] if traffic else []
    return Text(f"failed: {listing(said, 'and')}.", style="bold red")


def _near(predicted: int, counted: int) -> bool:
    return abs(predicted - counted) <= TOLERANCE * counted


def _on_device(found: dict[str, int]) -> int:
    return sum(size for kind, size in found.items() if kind not in OUTSIDE_KINDS)
