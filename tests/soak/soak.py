"""The kill test: runs of `megalite train` that are killed again and again, beside twins that nobody kills.

Every run is started, killed with SIGKILL (the whole job at once, its launcher or one rank), and started again until it
is done. After each kill no process may be left, every checkpoint must be complete to the byte, and the next start must
go on from the newest. At the end losses, gradient norms and every tensor are those of the twin: bitwise where the
layout stays the same, to 1e-10 where every start has another. Samples are counted: each once per epoch.

Beside the kills, at random: a second job is started in the folder, which must be refused before it touches anything;
for a while nothing can be written to any file, as if the disk were full (by a limit on the size of files, which needs
no root); nobody reads the job's stdout any more. None of them may end training or lose anything but reports.

A quarter of the runs keep their layout. Another quarter save on their nodes first, each rank on a node of its own;
after half of their kills a node is lost, and the next start must go on from the newest step that is whole anywhere. A
third quarter keep their layout and have optimizer states in files of a folder, in which no kill may leave anything;
their twins have theirs on the device. A run asks for half of its steps first, and is extended when it has them.
"""

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from killed_run import BATCH, CONFIG_FILE, NUISANCES, KilledRun, Say, Tally, ranks_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from sample_count import LENGTH, VOCABULARY, WEIGHTS, write_sources
from violation import Violation

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.files import write_whole
from megalite.base.stop_signals import listen, stop
from megalite_tools.report_file import cpu_name

COMMAND = "soak"
KINDS = ("same", "changing", "local", "files")
KILLS_OF_A_RUN = 12
STEPS_OF_A_KILL = 4  # that a run gains from one kill to the next, or a little less
LEAST_STEPS = 20
INSIDE = 0.25  # least share of the kills that must land inside a save
CONFIG = f"""\
run: {{dir: runs, device: cpu}}
model: {{layers: 4, width: 32, heads: 4, kv_heads: 2, ffn: 48, vocab_size: {VOCABULARY}, sequence_length: {LENGTH}, \
tie_embeddings: true}}
batch: {{micro: 3, global: {BATCH}}}
train: {{precision: fp64, timeout: 120}}
optim: {{lr: 0.002}}
schedule: {{name: constant}}
log: {{tensorboard: false}}
data:
  train:
"""
PIPELINE = "parallel.pipeline"
LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("parallel.pp=2", f"{PIPELINE}.schedule=interleaved_1f1b", f"{PIPELINE}.virtual_stages=2"),
    ("parallel.tp=2", "parallel.dp_shard=2", "parallel.data.mode=zero2"),
    ("parallel.dp_shard=2", "batch.micro=2"),
    ("parallel.dp_shard=3", "batch.micro=2"),
    ("parallel.cp=2",),
    ("parallel.pp=2", "parallel.tp=2", f"{PIPELINE}.schedule=zb_h1"),
    ("batch.micro=6",),
    ("parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.data.mode=zero1"),
    ("parallel.pp=2", f"{PIPELINE}.schedule=dualpipev"),
    ("parallel.pp=3", f"{PIPELINE}.split=[2,1,1]", f"{PIPELINE}.schedule=gpipe"),
    ("parallel.dp_replicate=2", "parallel.data.mode=ddp"),
    ("parallel.cp=2", "parallel.dp_shard=2", "parallel.context.method=ulysses"),
    ("parallel.pp=2", "parallel.dp_shard=2", "batch.micro=1", f"{PIPELINE}.schedule=zbv"),
    ("parallel.tp=2", "checkpoint.async=false"),
    ("parallel.pp=4",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kill test; 0, 1 at the first violation, 2 for bad input, 3 when stopped, 130 when interrupted."""
    args = _parse(argv)
    listen(stop)  # an exception, so that no job outlives the test
    console = Console(stderr=True)
    folder = (args.work or Path(tempfile.mkdtemp(prefix="megalite-soak-"))).resolve()
    command = shlex.join(["python", "tests/soak/soak.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        code = exit_code(COMMAND, lambda: _soak(args, folder, command, console))
    except Violation as violation:
        console.print(f"violation: {violation}\neverything is kept in {folder}", markup=False, soft_wrap=True)
        return 1
    if args.work is None:
        shutil.rmtree(folder)
    return code


def _soak(args: argparse.Namespace, folder: Path, command: str, console: Console) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--work {folder}: is not empty; name another folder, or leave it out")
    began, tallies = time.monotonic(), list[Tally]()
    kinds = [args.only] if args.only else list(KINDS)
    columns = TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("kills", total=args.kills)

        def say(text: str) -> None:
            console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False, soft_wrap=True)
            progress.update(task, completed=_kills(tallies))

        while (left := args.kills - _kills(tallies)) > 0:
            number, share = len(tallies), -(-args.kills // len(kinds))
            kills = min(KILLS_OF_A_RUN, share, left)
            run = _make_run(folder / f"run-{number:02d}", args, number, kinds[number % len(kinds)], kills, say)
            tallies.append(run.tally)
            say(f"run {number + 1}: {run.tally.kind} layout, {kills} kills in {run.steps} steps")
            run.endure(kills)
            say(f"run {number + 1} is done: largest difference {run.tally.difference:.3g}")
    result = _result(tallies, command, time.monotonic() - began)
    _show(result)
    if result["inside_a_save"] < int(INSIDE * args.kills):
        raise Violation(f"only {result['inside_a_save']} kills of {args.kills} have landed inside a save")
    if args.out:
        write_whole(args.out.with_suffix(".json"), json.dumps(result, indent=2) + "\n")
        write_whole(args.out, _markdown(result))


def _kills(tallies: Sequence[Tally]) -> int:
    return sum(len(tally.kills) for tally in tallies)


def _make_run(folder: Path, args: argparse.Namespace, number: int, kind: str, kills: int, say: Say) -> KilledRun:
    """Data, configuration and layouts of run `number`."""
    steps = max(LEAST_STEPS, STEPS_OF_A_KILL * kills)
    sizes = write_sources(folder / "data", steps * BATCH)
    sources = [f"    - {{path: data/source-{source}, weight: {weight}}}\n" for source, weight in enumerate(WEIGHTS)]
    (folder / CONFIG_FILE).write_text(CONFIG + "".join(sources))
    fitting = [layout for layout in LAYOUTS if ranks_of(folder, layout) <= args.ranks]
    seed = args.seed + number
    random.Random(args.seed).shuffle(fitting)
    alone = [fitting[number % len(fitting)]]
    layouts = alone if kind in ("same", "files") else [*fitting[number:], *fitting[:number]]
    return KilledRun(folder, seed, layouts, steps, sizes, say, kind)


def _result(tallies: Sequence[Tally], command: str, seconds: float) -> dict[str, Any]:
    kills = [kill for tally in tallies for kill in tally.kills]
    return {
        "command": command,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("megalite", "torch")}},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "seconds": round(seconds),
        "kills": len(kills),
        "killed": dict(Counter(kill["who"] for kill in kills)),
        "aimed_at": dict(Counter(kill["when"] for kill in kills)),
        "beside_them": {name: sum(tally.nuisances[name] for tally in tallies) for name in NUISANCES},
        "inside_a_save": sum(kill["inside"] == "save" for kill in kills),
        "inside_a_deletion": sum(kill["inside"] == "delete" for kill in kills),
        "seconds_until_gone": max((kill["gone"] for kill in kills), default=0.0),
        "nodes_lost": sum(tally.lost for tally in tallies),
        "checkpoints_verified": sum(tally.verified for tally in tallies),
        "resumes": sum(tally.resumes for tally in tallies),
        "runs": [asdict(tally) for tally in tallies],
    }


def _kind_of(run: dict[str, Any]) -> str:
    """The layouts of a run, and where it saves."""
    if run["kind"] in ("same", "files"):
        return (run["layouts"][0].replace("parallel.", "") or "one rank") + ", states in files" * (
            run["kind"] == "files"
        )
    return f"{len(run['layouts'])} in turn" + ", nodes first" * (run["kind"] == "local")


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """The table: its titles, and a row for each run."""
    rows = [["run", "layouts", "steps", "kills", "in saves", "verified", "resumes", "difference", "s"]]
    for number, run in enumerate(result["runs"], start=1):
        rows.append(
            [
                str(number),
                _kind_of(run),
                str(run["steps"]),
                str(len(run["kills"])),
                str(sum(kill["inside"] == "save" for kill in run["kills"])),
                str(run["verified"]),
                str(run["resumes"]),
                f"{run['difference']:.1e}" if run["difference"] else "none",
                f"{run['seconds']:.0f}",
            ]
        )
    return rows


def _show(result: dict[str, Any]) -> None:
    titles, *rows = _rows(result)
    table = Table(*(Column(title, overflow="fold") for title in titles))
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(_summary(result), highlight=False, soft_wrap=True)


def _summary(result: dict[str, Any]) -> str:
    who, when = (
        ", ".join(f"{count} {name}" for name, count in sorted(result[key].items())) for key in ("killed", "aimed_at")
    )
    beside = ", ".join(f"{result['beside_them'][name]} with {what}" for name, what in NUISANCES.items())
    return (
        f"{result['kills']} kills ({who}; aimed at: {when}), {result['inside_a_save']} of them inside a save and "
        f"{result['inside_a_deletion']} inside a deletion; all processes gone after at most "
        f"{result['seconds_until_gone']:.1f} s; {result['nodes_lost']} nodes lost beside them; "
        f"{result['checkpoints_verified']} checkpoints hashed, "
        f"{result['resumes']} resumes from the newest; starts {beside}; {result['seconds']} s in all"
    )


def _markdown(result: dict[str, Any]) -> str:
    titles, *rows = _rows(result)
    lines = [
        "# The kill test",
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().split("\n"),
        "",
        f"    {result['command']}",
        "",
        f"{_summary(result)}.",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"{result['cpu']}, {result['cores']} cores; "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        + ". Every kill is in the JSON file beside this one.",
        "",
        "The layouts that runs with a changing one take in turn:",
        "",
        *(f"- `{' '.join(layout) or 'one rank'}`" for layout in LAYOUTS),
        "",
    ]
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="default: 100")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of runs and of kills (default: 0)")
    parser.add_argument("--only", choices=KINDS, help="runs of this kind alone; else they take turns")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="largest number of ranks (default: 4)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep all runs in this new folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result to FILE and, as JSON, beside it")
    args = parser.parse_args(argv)
    for name, least in (("kills", 1), ("ranks", 1)):
        if getattr(args, name) < least:
            parser.error(f"argument --{name}: must be at least {least}")
    return args


if __name__ == "__main__":
    sys.exit(main())
