"""Compare the planner's step times and memory with published runs. A row of a CSV
file is one run; docs/planner_evidence.md explains the columns and their words.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from megalite.base.entry import exit_code
from megalite.base.errors import counted
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_output, write_object
from megalite.cost.constants import FITTED_CONSTANTS, Constants
from megalite_tools.plan.published.expert_facts import without_own_source
from megalite_tools.plan.published.fit import BOUNDS, fit
from megalite_tools.plan.published.other_planners import Peer, read_peers
from megalite_tools.plan.published.rows import Row, read_rows
from megalite_tools.plan.published.score import (
    TOP_LAYOUTS,
    TREND_RANGE,
    Compared,
    Judged,
    by_formula,
    by_source,
    judged,
    planned,
    ranking,
    score,
    timed,
    trend,
    weighed,
)
from megalite_tools.terminal import Terminal

COMMAND = "megalite-validate-planner"
WORST_ROWS = 10  # rows shown with --worst
GIB = 2**30


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="CSV", help="published runs")
    add("--json", metavar="FILE", help="write the errors to FILE too, with those of every row")
    add("--peers", metavar="FILE", help="compare with what other planners predict of these runs, as FILE (CSV) has it")
    add(
        "--worst",
        action="store_true",
        help=f"show the {WORST_ROWS} rows that are predicted worst, of time and of memory",
    )
    add(
        "--leave-out",
        action="store_true",
        help="predict the times of every source with constants that are fitted anew on all others (minutes)",
    )
    add("--fit", action="store_true", help="fit the constants anew on all rows, and tell them (minutes)")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.json:
        check_output(Path(options.json))
    terminal = Terminal()
    rows, left_out = [], []
    for file in options.files:
        found, skipped = read_rows(Path(file))
        rows += found
        left_out += skipped
    peers = read_peers(Path(options.peers), rows) if options.peers else None
    constants = _fitted(terminal, rows) if options.fit else FITTED_CONSTANTS
    times = _without(rows) if options.leave_out else timed(rows, constants)
    memory, verdicts = weighed(rows), judged(rows)
    _show(terminal, times, memory, verdicts)
    if peers is not None:
        _show_peers(terminal, peers)
    if options.worst and verdicts:
        _show_worst(terminal, times, memory)
    if left_out:
        terminal.line(f"{counted(len(left_out), 'row')} cannot be predicted, the first: {left_out[0]}")
    if options.json:
        write_object(Path(options.json), _report(times, memory, verdicts, left_out))
    return ExitCode.DONE


def _fitted(terminal: Terminal, rows: Sequence[Row]) -> Constants:
    """Constants for all rows together, shown beside those in `megalite/cost/constants.py`."""
    found = fit(rows, FITTED_CONSTANTS)
    terminal.table(
        ("constant:", "now", "fitted"),
        [(name, f"{getattr(FITTED_CONSTANTS, name):.4g}", f"{getattr(found, name):.4g}") for name in BOUNDS],
    )
    return found


def _without(rows: Sequence[Row]) -> list[Compared]:
    """Step times of every source with constants that were fitted without it; of rows with experts, their facts."""
    found = without_own_source([row for row in rows if row.work.experts])
    rows = [row for row in rows if not row.work.experts]
    told, sources = Console(stderr=True), sorted({row.source for row in rows})
    for source in track(sources, "Fitting without", console=told, transient=True, disable=not told.is_terminal):
        others = [row for row in rows if row.source != source]
        constants = fit(others) if any(row.seconds is not None and row.fits for row in others) else FITTED_CONSTANTS
        found += timed([row for row in rows if row.source == source], constants)
    return found


def _show(terminal: Terminal, times: list[Compared], memory: list[Compared], verdicts: list[Judged]) -> None:
    if not verdicts:
        terminal.line("There is no row that can be predicted.")
        return
    columns = ("rows", "mean error", "p90", "bias", "in interval")
    if times:
        terminal.table(
            ("step time of:", *columns),
            [(name, *_errors(group)) for name, group in [*sorted(by_source(times).items()), *_ways(times)] if group],
        )
    if memory:
        kinds = sorted({(each.row.source, each.row.counts) for each in memory})
        parts = [
            (source, counts, [each for each in memory if (each.row.source, each.row.counts) == (source, counts)])
            for source, counts in kinds
        ]
        terminal.table(
            ("memory of:", "counted:", *columns),
            [(source, counts, *_errors(group)) for source, counts, group in [*parts, ("all", "", memory)]],
        )
    terminal.table(
        ("rows that:", "rows", "predicted so"),
        [
            (name, f"{len(group)}", f"{sum(each.right for each in group)}")
            for name, group in (("ran out of memory", _ran_out(verdicts)), ("fitted", _ran(verdicts)))
        ],
    )
    of = ranking(times)
    if of.groups:
        terminal.line(
            f"The best measured layout is among the {TOP_LAYOUTS} best predicted ones in {of.right} of {of.groups} "
            f"groups of layouts; of groups with more than {TOP_LAYOUTS}, in {of.contested_right} of {of.contested}."
        )
    if grows := trend(times):
        terminal.line(
            f"On more GPUs, measured times grow beyond predicted ones as if GPUs' speeds had a spread of "
            f"{grows.spread:.1%} ± {grows.error:.1%} ({grows.sources} sources with at least {TREND_RANGE} times as "
            "many GPUs of their largest run as of their smallest)."
        )


def _ways(times: Sequence[Compared]) -> list[tuple[str, list[Compared]]]:
    """Rows that a configuration expresses, as it is planned and by the formula; and all rows."""
    ours = planned(times)
    return [("through predict()", ours), ("the same, by the formula", by_formula(ours)), ("all", list(times))]


def _show_peers(terminal: Terminal, peers: Sequence[Peer]) -> None:
    """Mean errors of other planners by source, and megalite's on the very same runs."""
    shown = []
    for program in dict.fromkeys(peer.program for peer in peers):
        own = [peer for peer in peers if peer.program == program]
        sources = dict.fromkeys(peer.ours.row.source for peer in own)
        parts = [(source, [peer for peer in own if peer.ours.row.source == source]) for source in sources]
        for source, group in [*parts, ("all", own)]:
            means = (score([each.theirs for each in group]), score([each.ours for each in group]))
            errors = [f"{of.mean_abs_error:.1%}" for of in means if of is not None]
            shown.append((program, source, f"{len(group)}", *errors))
    if not shown:
        terminal.line("Other planners have predicted none of these runs.")
        return
    terminal.table(("planner:", "runs of:", "runs", "its mean error", "megalite's"), shown)


def _errors(group: Sequence[Compared]) -> tuple[str, ...]:
    of = score(group)
    assert of is not None
    return f"{of.rows}", f"{of.mean_abs_error:.1%}", f"{of.p90:.1%}", f"{of.bias:+.1%}", f"{of.inside_interval:.0%}"


def _ran_out(verdicts: Sequence[Judged]) -> list[Judged]:
    return [each for each in verdicts if not each.row.fits]


def _ran(verdicts: Sequence[Judged]) -> list[Judged]:
    return [each for each in verdicts if each.row.fits]


def _show_worst(terminal: Terminal, times: list[Compared], memory: list[Compared]) -> None:
    for name, found, unit, size in (("time", times, "s", 1.0), ("memory", memory, "GiB", GIB)):
        worst = sorted(found, key=lambda each: -abs(each.error))[:WORST_ROWS]
        terminal.table(
            (f"{name} of row:", "predicted", "measured", "error"),
            [
                (
                    each.row.place,
                    f"{each.predicted / size:.4g} {unit}",
                    f"{each.measured / size:.4g} {unit}",
                    f"{each.error:+.1%}",
                )
                for each in worst
            ],
        )


def _report(
    times: list[Compared], memory: list[Compared], verdicts: list[Judged], left_out: list[str]
) -> dict[str, Any]:
    time_of, memory_of, verdicts_of = by_source(times), by_source(memory), by_source(verdicts)
    return {
        **_told(times, memory, verdicts),
        "by_source": {
            source: _told(time_of.get(source, []), memory_of.get(source, []), group)
            for source, group in sorted(verdicts_of.items())
        },
        "rows": _rows(times, memory, verdicts),
        "left_out": left_out,
    }


def _told(times: list[Compared], memory: list[Compared], verdicts: list[Judged]) -> dict[str, Any]:
    """Errors and verdicts of some rows. `memory` is of all rows that have any; it is also split by what they count."""
    kinds = sorted({each.row.counts for each in memory})
    return {
        "time": _score(times),
        "planned": {"predict": _score(planned(times)), "formula": _score(by_formula(times))},
        "memory": _score(memory),
        "memory_counted": {kind: _score([each for each in memory if each.row.counts == kind]) for kind in kinds},
        "oom": _right(_ran_out(verdicts)),
        "fits": _right(_ran(verdicts)),
        "ranking": asdict(ranking(times)),
        "trend": asdict(grows) if (grows := trend(times)) else None,
    }


def _score(group: Sequence[Compared]) -> dict[str, Any] | None:
    of = score(group)
    return None if of is None else asdict(of)


def _right(verdicts: Sequence[Judged]) -> dict[str, int]:
    return {"rows": len(verdicts), "right": sum(each.right for each in verdicts)}


def _rows(times: list[Compared], memory: list[Compared], verdicts: list[Judged]) -> list[dict[str, Any]]:
    """One object for every row: what was predicted of it, and what was measured. Seconds, and bytes of memory."""
    time_of, memory_of = ({id(each.row): each for each in found} for found in (times, memory))
    return [
        {
            "row": verdict.row.place,
            "source": verdict.row.source,
            "fits": {"predicted": verdict.fits, "published": verdict.row.fits},
            "time": _compared(time := time_of.get(id(verdict.row))),
            "planned": time is not None and time.formula is not None,
            "memory": _compared(memory_of.get(id(verdict.row))),
            "memory_counted": verdict.row.counts if verdict.row.memory is not None else None,
        }
        for verdict in verdicts
    ]


def _compared(each: Compared | None) -> dict[str, float] | None:
    if each is None:
        return None
    return {
        "predicted": each.predicted,
        "measured": each.measured,
        "error": each.error,
        "least": each.predicted / (1 + each.spread),
        "most": each.predicted * (1 + each.spread),
    }


if __name__ == "__main__":
    sys.exit(main())
