"""Compare the planner's step times with published runs. A row of a CSV file is
one run; docs/planner.md explains the columns.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.config.files import check_output, write_object
from megalite.entry import exit_code
from megalite.exit_codes import ExitCode
from megalite.planner.constants import FITTED, Constants
from megalite.planner.published import Row, read_rows
from megalite.planner.score import Timed, by_source, fit, score, timed
from megalite_tools.terminal import Terminal

COMMAND = "megalite-validate-planner"
WORST = 10  # rows shown with --worst


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="CSV", help="published runs")
    add("--json", metavar="FILE", help="write the errors to FILE too, with those of every row")
    add("--worst", action="store_true", help=f"show the {WORST} rows that are predicted worst")
    add(
        "--leave-out",
        action="store_true",
        help="predict every source with constants that are fitted anew on all others (minutes)",
    )
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
    found = _without(rows) if options.leave_out else timed(rows)
    _show(terminal, found)
    if options.worst:
        _show_worst(terminal, found)
    if left_out:
        terminal.line(f"{len(left_out)} rows cannot be predicted, the first: {left_out[0]}")
    if options.json:
        write_object(Path(options.json), _report(found, left_out))
    return ExitCode.DONE


def _without(rows: Sequence[Row]) -> list[Timed]:
    """Predictions of every source with constants that were fitted without it."""
    found: list[Timed] = []
    for source in sorted({row.source for row in rows}):
        others = [row for row in rows if row.source != source]
        constants = fit(others, Constants()) if others else FITTED
        found += timed([row for row in rows if row.source == source], constants)
    return found


def _show(terminal: Terminal, found: list[Timed]) -> None:
    table = []
    for source, group in [*sorted(by_source(found).items()), ("all", found)]:
        if of := score(group):
            inside = f"{of.inside_interval:.0%}"
            table.append((source, f"{of.rows}", f"{of.mean_abs_error:.1%}", f"{of.p90:.1%}", f"{of.bias:+.1%}", inside))
    terminal.table(("step time of:", "rows", "mean error", "p90", "bias", "in interval"), table)


def _show_worst(terminal: Terminal, found: list[Timed]) -> None:
    worst = sorted(found, key=lambda each: -abs(each.error))[:WORST]
    terminal.table(
        ("row:", "predicted", "measured", "error"),
        [(each.row.place, f"{each.predicted:.4g} s", f"{each.measured:.4g} s", f"{each.error:+.1%}") for each in worst],
    )


def _report(found: list[Timed], left_out: list[str]) -> dict[str, Any]:
    def told(group: list[Timed]) -> dict[str, Any] | None:
        of = score(group)
        return None if of is None else asdict(of)

    return {
        "time": told(found),
        "by_source": {source: {"time": told(group)} for source, group in sorted(by_source(found).items())},
        "rows": [
            {"row": each.row.place, "predicted_s": each.predicted, "measured_s": each.measured, "error": each.error}
            for each in found
        ],
        "left_out": left_out,
    }


if __name__ == "__main__":
    sys.exit(main())
