"""Reading batches of a token store from a server, beside the same store on a disk.

Batches are made as a rank's loader makes them. The first round from the server begins with an empty cache; later ones,
which take turns with rounds from the disk, find all blocks there. Every batch is compared with the one from the disk.
Batches are read by themselves, and ahead of steps that leave the processor to the loader, as those of a GPU do.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import write_object
from megalite.config.schema import Remote, Source
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.data.store import MAX_VOCABULARY
from megalite.plan.batches import GlobalBatch
from megalite_tools.report_file import add_out, header
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-data"
MAX_STEP = 60.0  # seconds
GOAL = 1.1  # times the disk's time for a batch that a warm cache may take


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: BAD_INPUT also if a batch differs."""
    return exit_code(COMMAND, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("local", metavar="PREFIX", help="the store on a disk")
    parser.add_argument("remote", metavar="URL", help="the prefix of the same store on a server")
    parser.add_argument("--cache", default=".", help="folder on the disk of the cache (default: here)")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="sequences (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=32, help="in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step (default: %(default)s)")
    add_out(parser, "data_cpu.json")
    options = parser.parse_args(arguments)
    if min(options.sequence_length, options.batch, options.batches, options.rounds) < 1:
        raise InputError("--sequence-length, --batch, --batches and --rounds must be at least 1")
    if not 0 <= options.step <= MAX_STEP:
        raise InputError(f"--step {options.step}: must be 0 to {MAX_STEP:g} seconds")
    with TemporaryDirectory(prefix=f"{COMMAND}-", dir=options.cache) as cache:
        report = header(shlex.join([COMMAND, *arguments])) | _measured(options, Remote(cache, 4.0))
    _show(report)
    write_object(Path(options.out), report)
    return ExitCode.DONE


def _measured(options: argparse.Namespace, remote: Remote) -> dict[str, Any]:
    loaders = {
        where: Loader(Samples([Source(path)], 0, options.sequence_length, MAX_VOCABULARY, None, remote), 1, 1, 0)
        for where, path in (("disk", options.local), ("server", options.remote))
    }
    batches = [GlobalBatch(number * options.batch, options.batch) for number in range(options.batches)]
    cold = [_seconds(loaders, "server", batch) for batch in batches]
    times: dict[str, list[float]] = {where: [] for where in loaders}
    ahead: dict[str, list[float]] = {where: [] for where in loaders}
    for _ in range(options.rounds):
        for where in loaders:
            times[where].append(statistics.median(_seconds(loaders, where, batch) for batch in batches))
            ahead[where].append(_seconds_with_steps(loaders[where], batches, options.step))
    for batch in batches:
        if not torch.equal(*(loader.read(batch).tokens for loader in loaders.values())):
            raise InputError(f"{options.remote}: batch {batch.first // options.batch} is not that of {options.local}")
    seconds = {"server, empty cache": statistics.median(cold)}
    seconds |= {"server, warm cache": statistics.median(times["server"]), "disk": statistics.median(times["disk"])}
    seconds |= {f"{where}, with steps": statistics.median(ahead[where]) for where in ("server", "disk")}
    return {
        "seconds_per_batch": seconds,
        "step_seconds": options.step,
        "rounds": times,
        "rounds_with_steps": ahead,
        "warm_to_disk": _ratio(times),
        "warm_to_disk_with_steps": _ratio(ahead),
        "goal": GOAL,
    }


def _ratio(times: dict[str, list[float]]) -> float:
    return statistics.median(server / disk for server, disk in zip(times["server"], times["disk"], strict=True))


def _seconds(loaders: dict[str, Loader], where: str, batch: GlobalBatch) -> float:
    began = time.perf_counter()
    loaders[where].read(batch)
    return time.perf_counter() - began


def _seconds_with_steps(loader: Loader, batches: Sequence[GlobalBatch], step: float) -> float:
    """Seconds per batch where each is followed by a step, in which the next ones are read."""
    began = time.perf_counter()
    for _ in loader.batches(batches):
        time.sleep(step)
    return (time.perf_counter() - began) / len(batches)


def _show(report: dict[str, Any]) -> None:
    terminal = Terminal()
    rows = [(where, f"{1e3 * seconds:,.2f}") for where, seconds in report["seconds_per_batch"].items()]
    terminal.table((":", "ms per batch, median"), rows)
    terminal.line(
        f"A warm cache takes {report['warm_to_disk']:.2f} times as long as the disk, and "
        f"{report['warm_to_disk_with_steps']:.2f} times with steps of {1e3 * report['step_seconds']:g} ms "
        f"(goal: {report['goal']})."
    )


if __name__ == "__main__":
    sys.exit(main())
