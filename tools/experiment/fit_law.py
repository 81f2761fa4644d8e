"""Fit scaling laws to a CSV of parameters, tokens (or FLOPs) and losses, from whatever runs."""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from rich.text import Text

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, listing, printable
from megalite.base.files import check_output, write_object
from megalite.base.terminal import console, sections
from megalite.experiment.fitting import MAX_SAMPLES
from megalite.scaling.approach3 import fit3
from megalite.scaling.law import FLOPS
from megalite.scaling.record import record
from megalite.scaling.settings import Settings
from megalite.scaling.show import parts
from megalite.scaling.table import Results, RunResult, number_in, read_csv

COMMAND = "megalite-fit-law"


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _main(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("csv", type=Path, metavar="CSV", help="a file with a row for every run")
    parser.add_argument("--size", default="N", metavar="COLUMN", help="parameters (default: N)")
    parser.add_argument("--tokens", metavar="COLUMN", help="training tokens (default: D, without --flops)")
    parser.add_argument("--flops", metavar="COLUMN", help="FLOPs, from which tokens are C / (6·N)")
    parser.add_argument("--loss", default="loss", metavar="COLUMN", help="loss in nats per token (default: loss)")
    parser.add_argument("--delta", type=float, default=1e-3, help="where Huber's loss becomes linear (default: 1e-3)")
    parser.add_argument("--drop", type=int, default=0, metavar="K", help="leave out the K highest losses (default: 0)")
    parser.add_argument("--bootstrap", type=int, default=1000, metavar="N", help="draws of runs (default: 1000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    return parser


def _main(options: argparse.Namespace) -> None:
    if options.tokens and options.flops:
        raise InputError("--tokens, --flops: give one of them; the other follows as C = 6·N·D")
    if not 0 < options.delta <= 10:
        raise InputError(f"--delta {options.delta}: must be above 0, at most 10")
    if options.drop < 0 or not 0 <= options.bootstrap <= MAX_SAMPLES:
        raise InputError(f"--drop, --bootstrap: must be at least 0, and --bootstrap at most {MAX_SAMPLES:,}")
    if options.json is not None:
        check_output(options.json)
    results = _results(options)
    settings = Settings(
        kind="ladder",
        name=options.csv.stem,
        delta=options.delta,
        drop=options.drop,
        bootstrap=options.bootstrap,
        parameters="total",
        report=("total",),
    )
    try:
        found = record(results, settings)
    except InputError as error:
        raise InputError(f"{options.csv}: {error}") from None
    if options.json is not None:
        write_object(options.json, found)
    on = console()
    sections(on, parts(found))
    law = found["fits"]["total"]["approach3"]
    fit = law["law"]
    exact = ", ".join(f"{name} {value:.6g}" for name, value in fit.items())
    on.print()
    on.print(
        Text(f"{exact}; objective {law['objective']:.6e}; the fit took {_seconds(results, settings):.2f} s of CPU time")
    )


def _results(options: argparse.Namespace) -> Results:
    path: Path = options.csv
    header, lines = read_csv(path)
    third = options.flops or options.tokens or "D"
    for option, name in (
        ("--size", options.size),
        ("--flops" if options.flops else "--tokens", third),
        ("--loss", options.loss),
    ):
        if name not in header:
            raise InputError(
                f"{path}: {option} {name}: is no column; there are {printable(listing(list(header), 'and'))}"
            )
    runs = []
    for line, cells in lines:
        size, given, loss = (number_in(path, line, name, cells[name]) for name in (options.size, third, options.loss))
        tokens = given / FLOPS / size if options.flops and size > 0 else given
        numbers = {"n_total": size, "tokens": tokens, "loss_valid": loss}
        runs.append(
            RunResult(
                f"{line:010x}", f"line {line}", "ladder", "", "done" if loss == loss else "failed", numbers, {}, {}
            )
        )
    return Results(tuple(runs), ())


def _seconds(results: Results, settings: Settings) -> float:
    """Seconds of processor time that one fit by approach 3 takes."""
    sizes, tokens, losses = (
        np.array([run.number(name) for run in results.done()]) for name in ("n_total", "tokens", "loss_valid")
    )
    keep = np.sort(np.argsort(-losses, kind="stable")[settings.drop if isinstance(settings.drop, int) else 0 :])
    before = time.process_time()
    fit3(sizes[keep], tokens[keep], losses[keep], settings.delta)
    return time.process_time() - before


if __name__ == "__main__":
    sys.exit(main())
