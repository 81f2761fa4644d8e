"""Expand, budget, launch and collect the runs that one YAML file describes."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rich.text import Text

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, counted, printable
from megalite.base.exit_codes import ExitCode
from megalite.base.exit_codes import table as codes
from megalite.base.terminal import console, table
from megalite.experiment import launching
from megalite.experiment.cell import Cell, Counts
from megalite.experiment.cost import Costs, check_budget, estimate
from megalite.experiment.expand import Expanded
from megalite.experiment.folder import END_STATES, STATES, ExperimentFolder, State
from megalite.experiment.read import read_experiment
from megalite.experiment.results import Row, collect, measured, runs_are_elsewhere
from megalite_launch.base.errors import UserError
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.base.texts import lasting, scaled
from megalite_launch.submit.check_first import find_megalite

COMMAND = launching.COMMAND
MAX_LISTED_RUNS = 40  # runs that a table of a launch shows
UNDONE_STATES = tuple(state for state in END_STATES if state != "done")
COLORS = {"done": "green", "running": "cyan", "oom": "red", "diverged": "red", "timeout": "red", "failed": "red"}
EPILOG = codes(
    {
        ExitCode.DONE: "done; after launch: all runs are done, or were submitted",
        ExitCode.FAILED: "launch: a run is oom, diverged, timeout or failed, or\ncould not begin; status tells which",
        ExitCode.BAD_INPUT: "bad input, or a budget that would be exceeded",
        ExitCode.STOPPED: "launch was stopped by a signal, and runs have saved;\nthe same command goes on",
    }
)


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(dest="way", required=True, metavar="WHAT")
    for name, (work, summary) in WAYS.items():
        way = ways.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        way.set_defaults(work=work)
        way.add_argument("experiment", type=Path, metavar="EXP.yaml", help="the experiment, or its folder")
        if name in ("expand", "launch"):
            way.add_argument("--dry-run", action="store_true", help="show what would be done, and write nothing")
        if name in ("cost", "launch"):
            way.add_argument(
                "--only",
                type=_states,
                default=(),
                metavar="STATE,…",
                help=f"runs in these states ({', '.join(STATES)}), in place of those that are planned",
            )
        if name == "launch":
            way.add_argument("--megalite", metavar="PATH", help="the megalite command (default: beside this Python)")
    return parser


def _states(text: str) -> tuple[State, ...]:
    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if name not in STATES or name in ("done", "running", "submitted")]
    if wrong:
        can = [state for state in STATES if state not in ("done", "running", "submitted")]
        raise argparse.ArgumentTypeError(f"{wrong[0]!r:.40}: must be of {', '.join(can)}")
    return tuple(state for state in STATES if state in names)


def _run(options: argparse.Namespace) -> int | None:
    work: Callable[[argparse.Namespace], int | None] = options.work
    try:
        return work(options)
    except UserError as error:
        raise InputError(str(error)) from None


def _expanded(options: argparse.Namespace) -> tuple[Expanded, launching.Known]:
    """The experiment with all rounds of successive halving that are known, and how its runs stand."""
    return launching.expanded_now(read_experiment(options.experiment))


def _expand(options: argparse.Namespace) -> None:
    expanded, known = _expanded(options)
    _show_runs(expanded)
    if not options.dry_run:
        launching.write_files(expanded, known)
        console().print(Text(f"\nwritten to {expanded.setup.folder}"))


def _show_runs(expanded: Expanded) -> None:
    ladder = expanded.setup.kind == "ladder"
    size = expanded.setup.experiment.parameters.fit
    keys = expanded.axes
    extra = ["rung"] if ladder else []
    shown = table("run", *extra, *keys, "seed", "N", "tokens", "steps", "from step", "ranks", text=("run", "rung"))
    for cell in expanded.cells:
        shown.add_row(
            cell.name,
            *([cell.rung] if ladder else []),
            *(
                f"{cell.axes.get(key, ''):.4g}"
                if isinstance(cell.axes.get(key), float)
                else str(cell.axes.get(key, ""))
                for key in keys
            ),
            str(cell.seed),
            scaled(Counts.of(cell.config.model).by(size), ""),
            scaled(cell.tokens, ""),
            f"{cell.steps:,}",
            f"{cell.start:,}" if cell.start else "",
            f"{cell.gpus:,}",
        )
    out = console()
    out.print(shown)
    out.print(Text(_count(expanded)))


def _count(expanded: Expanded) -> str:
    runs = counted(len(expanded.cells), "run")
    same = expanded.settings - expanded.excluded - len(expanded.cells)
    would = f"{same:,} that would repeat another {'is' if same == 1 else 'are'} left out"
    told = [would] * (same > 0 and not expanded.setup.experiment.halving)
    told += [f"{expanded.excluded:,} excluded"] * (expanded.excluded > 0)
    told += [f"{expanded.later:,} more in rounds that follow from results"] * (expanded.later > 0)
    trained = sum(cell.tokens - cell.start * cell.step_tokens for cell in expanded.cells)
    whole = sum(cell.tokens for cell in expanded.cells)
    told.append(f"{scaled(trained, 'tokens')} to train on")
    if trained < whole:
        told.append(f"{1 - trained / whole:.0%} fewer than without trunks")
    return f"{runs}: {', '.join(told)}"


def _cost(options: argparse.Namespace) -> None:
    expanded, known = _expanded(options)
    cells = launching.chosen(expanded, known, options.only)
    _show_costs(expanded, _costs(expanded, known, cells))


def _costs(expanded: Expanded, known: launching.Known, cells: Sequence[Cell]) -> Costs:
    rows = launching.rows(expanded, known)
    folder = ExperimentFolder(expanded.setup.folder)
    saved = {cell.id: RunFolder(folder.run(cell.name)).newest_step() for cell in cells}
    return estimate(expanded, cells, measured(rows, expanded, known), saved)


def _show_costs(expanded: Expanded, costs: Costs, most: int | None = None) -> None:
    out = console()
    shown = table(
        "run", "ranks", "steps", "time", "GPU-hours", "time of a step from", text=("run", "time of a step from")
    )
    for cost in costs.costs[:most]:
        shown.add_row(
            cost.cell.name,
            f"{cost.cell.gpus:,}",
            f"{cost.steps:,}",
            lasting(cost.seconds),
            f"{cost.gpu_hours:,.3g}",
            cost.source if cost.fits else f"{cost.source}; does not fit into memory",
        )
    if costs.costs:
        out.print(shown)
    if most is not None and len(costs.costs) > most:
        out.print(Text(f"and {len(costs.costs) - most:,} more"))
    told = f"{counted(len(costs.costs) + len(costs.unknown), 'run')}: "
    if not costs.costs and not costs.unknown:
        told += "none is left to start"
    if costs.costs:
        hours = f"{costs.gpu_hours:,.3g} GPU-hours"
        parallel = expanded.setup.experiment.launch.parallel
        told += f"{hours}, {lasting(costs.seconds / parallel)} with {parallel} at a time"
        told += f"; {costs.later:,.3g} GPU-hours of that in later rounds" if costs.later else ""
    if costs.unknown:
        told += f"{'; ' if costs.costs else ''}nothing tells the time of a step of {len(costs.unknown):,} of them: "
        told += "set launch.cluster, or launch.flops_per_second as one rank has reached it"
    most_hours = expanded.setup.experiment.launch.max_gpu_hours
    told += f" (launch.max_gpu_hours: {most_hours:g})" if most_hours is not None else ""
    out.print(Text(told))


def _launch(options: argparse.Namespace) -> int:
    megalite = find_megalite(options.megalite)
    setup = read_experiment(options.experiment)
    only: tuple[State, ...] = options.only
    while True:
        surveyed = time.time()
        expanded, known = launching.expanded_now(setup)
        cells = launching.chosen(expanded, known, only)
        costs = _costs(expanded, known, cells)
        _show_costs(expanded, costs, MAX_LISTED_RUNS)
        check_budget(costs, expanded, launching.spent(expanded, known))
        if options.dry_run:
            return ExitCode.DONE
        with launching.alone(setup):
            if setup.experiment.launch.kind == "slurm":  # another launcher may have submitted some meanwhile
                expanded, known = launching.expanded_now(setup)
                cells = launching.chosen(expanded, known, only)
            launching.write_files(expanded, known)
            code = _start(expanded, cells, known, surveyed, megalite)
        rounds = setup.experiment.halving is not None and setup.experiment.launch.kind == "local"
        if code == ExitCode.STOPPED or not cells or not rounds:
            return code
        only = ()


def _start(expanded: Expanded, cells: Sequence[Cell], known: launching.Known, surveyed: float, megalite: str) -> int:
    """Start runs; returns the exit code."""
    if not cells:
        _show_counts(expanded, known)
        console().print(Text("nothing to start"))
        return _verdict(expanded, known)
    launching.prepare(expanded, cells, known, surveyed)
    started = launching.start(expanded, cells, megalite)
    if not isinstance(started, int):
        for job, tasks in started:
            console().print(Text(f"submitted {counted(tasks, 'task')} as job array {job}: squeue --job {job}"))
        console().print(Text(f"watch     {COMMAND} status {expanded.setup.folder}"))
        return ExitCode.DONE
    known = launching.survey(expanded)
    _show_counts(expanded, known)
    launching.rebuild_index(ExperimentFolder(expanded.setup.folder), expanded, known)
    return started or _verdict(expanded, known, cells)


def _verdict(expanded: Expanded, known: launching.Known, started: Sequence[Cell] = ()) -> int:
    """FAILED if a run has ended without being done, or one of those that were started has to be started again."""
    ended = any(known[cell.id][0].state in UNDONE_STATES for cell in expanded.cells)
    waits = any(known[cell.id][0].state == "planned" for cell in started)
    return ExitCode.FAILED if ended or waits else ExitCode.DONE


def _status(options: argparse.Namespace) -> None:
    expanded, known = _expanded(options)
    folder = ExperimentFolder(expanded.setup.folder)
    shown = table("run", "state", "step", "steps", "starts", "job", "", text=("run", "state", "job", ""))
    for cell in expanded.cells:
        status, step = known[cell.id]
        job = printable(status.job or (f"launch {status.launch}" if status.launch else ""))
        cells = (cell.name, Text(status.state, COLORS.get(status.state, "")), f"{step:,}", f"{cell.steps:,}")
        shown.add_row(*cells, str(status.attempts or ""), Text(job), Text(printable(status.reason)))
    console().print(shown)
    _show_counts(expanded, known)
    launching.settle(expanded, known)  # last: where the disk is full, people want to know how runs stand
    if others := launching.rebuild_index(folder, expanded, known):
        are = "is" if others == 1 else "are"
        console().print(Text(f"{counted(others, 'run')} in the folder {are} no longer part of the experiment"))


def _show_counts(expanded: Expanded, known: launching.Known) -> None:
    found = Counter(known[cell.id][0].state for cell in expanded.cells)
    told = [f"{found[state]:,} {state}" for state in STATES if found[state]]
    told += [f"{expanded.later:,} in later rounds"] if expanded.later else []
    console().print(Text(f"{counted(len(expanded.cells), 'run')}: {', '.join(told)}"))


def _collect(options: argparse.Namespace) -> None:
    expanded, known = _expanded(options)
    folder = ExperimentFolder(expanded.setup.folder)
    if runs_are_elsewhere(folder):
        raise InputError(
            f"{folder.runs}: is missing, and {folder.results} has finished runs that would be lost; bring the run "
            "folders back, or move that file"
        )
    launching.write_files(expanded, known)
    rows: list[Row] = collect(expanded, known)
    _show_counts(expanded, known)
    console().print(Text(f"{folder.results}: {counted(len(rows), 'row')}"))


def _fit(options: argparse.Namespace) -> None:
    import_module("megalite.commands.fit").fit(_collected(options))  # NumPy is not waited for by other ways


def _report(options: argparse.Namespace) -> None:
    import_module("megalite.commands.experiment_report").report(_collected(options))


def _collected(options: argparse.Namespace) -> Path:
    """The folder of the experiment, with the results as they are now."""
    expanded, known = _expanded(options)
    folder = ExperimentFolder(expanded.setup.folder)
    launching.write_files(expanded, known)
    if runs_are_elsewhere(folder):
        console().print(Text(f"{folder.runs} is missing: {folder.results} is read as it is\n"))
    else:
        collect(expanded, known)
    return folder.path


WAYS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str]] = {
    "expand": (_expand, "show the runs of an experiment, and make its folder"),
    "cost": (_cost, "tell what the runs that are left will take"),
    "launch": (_launch, "start all runs that are not done, here or by Slurm"),
    "status": (_status, "tell how every run stands"),
    "collect": (_collect, "write results.csv, a row for every run"),
    "fit": (_fit, "collect, and fit scaling laws to what was measured: fit.json"),
    "report": (_report, "collect, and write one page with all pictures: report/index.html"),
}


if __name__ == "__main__":
    sys.exit(main())
