"""Preparing data with an engine, beside one process without: documents per second of a core.

Each way runs the whole command, from its start to its end, in turn with the others. Seconds of a core are the processor
time of all its processes, so that other work on the machine counts as little as it can. The same documents come out.
"""

import argparse
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import write_object
from megalite.data.joined_store import open_store
from megalite_tools.report_file import add_out, header
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-preparation"
GOAL = 0.9  # least share of the rate of one process
ONE = "one process"
PROGRAM = "from megalite_tools.commands import prepare_data; raise SystemExit(prepare_data())"


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: BAD_INPUT also if a way gives other documents."""
    return exit_code(COMMAND, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="as megalite-prepare-data takes them")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="as megalite-prepare-data takes it")
    parser.add_argument("--shards", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--folder", default=".", help="folder on the disk of the stores (default: here)")
    add_out(parser, "preparation_cpu.json")
    options = parser.parse_args(arguments)
    if min(options.shards, options.rounds) < 1:
        raise InputError("--shards and --rounds must be at least 1")
    report = header(shlex.join([COMMAND, *arguments]), ("megalite", "sentencepiece")) | _measured(options)
    _show(report)
    write_object(Path(options.out), report)
    return ExitCode.DONE


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    local = ("--engine", "local", "--shards", str(options.shards), "--workers")
    ways = {ONE: ("--workers", "1"), "engine local, 1 worker": (*local, "1"), "engine local, 2 workers": (*local, "2")}
    given = [*options.inputs, "--tokenizer", options.tokenizer]
    rounds: list[dict[str, dict[str, float]]] = []
    counts: dict[str, tuple[int, int]] = {}
    for _ in range(options.rounds):
        rounds.append({})
        for way, more in ways.items():
            with TemporaryDirectory(prefix=f"{COMMAND}-", dir=options.folder) as folder:
                rounds[-1][way] = _seconds([*given, *more, "--out", f"{folder}/store"])
                store = open_store(f"{folder}/store")
                counts[way] = store.documents, store.tokens
    documents, tokens = counts[ONE]
    for way, found in counts.items():
        if found != counts[ONE]:
            raise InputError(
                f"{way}: made {found[0]:,} documents of {found[1]:,} tokens, and {ONE} {documents:,} of {tokens:,}"
            )
    return {
        "documents": documents,
        "tokens": tokens,
        "shards": options.shards,
        "documents_per_core_second": {
            way: documents / statistics.median(each[way]["core"] for each in rounds) for way in ways
        },
        "to_one_process": {
            way: statistics.median(each[ONE]["core"] / each[way]["core"] for each in rounds) for way in ways
        },
        "rounds": rounds,
        "goal": GOAL,
    }


def _seconds(arguments: Sequence[str]) -> dict[str, float]:
    """Seconds of a core, and by the clock, that one preparation takes. Raises InputError if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise InputError(done.stderr.strip()[-2000:])
    return {"core": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "clock": clock}


def _show(report: dict[str, Any]) -> None:
    terminal = Terminal()
    clock = {way: statistics.median(each[way]["clock"] for each in report["rounds"]) for way in report["rounds"][0]}
    rows = [
        (way, f"{rate:,.0f}", f"{report['to_one_process'][way]:.3f}", f"{clock[way]:.1f}")
        for way, rate in report["documents_per_core_second"].items()
    ]
    terminal.table((":", "documents per second of a core", "beside one process", "seconds by the clock"), rows)
    terminal.line(f"An engine is to have at least {report['goal']} of the rate of one process.")


if __name__ == "__main__":
    sys.exit(main())
