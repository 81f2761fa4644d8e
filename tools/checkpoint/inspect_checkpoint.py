"""List the checkpoints of a run, verify their hashes, show their tensors, and
compare two of them.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalite.base.entry import exit_code
from megalite.base.exit_codes import ExitCode, table
from megalite.base.files import as_json, write_object
from megalite.checkpoint.store.disk import DamagedError, total_bytes
from megalite.checkpoint.store.manifest import Manifest
from megalite.checkpoint.store.retain import check_folder
from megalite_launch.base.texts import scaled
from megalite_tools.checkpoint.checkpoints import Entry, damage, find, layout_of, saved_at, survey
from megalite_tools.checkpoint.diff_checkpoints import diff
from megalite_tools.checkpoint.index_checkpoint import index
from megalite_tools.checkpoint.show_checkpoint import show
from megalite_tools.terminal import Terminal, bar

COMMAND = "megalite-inspect-checkpoint"
CODES = {
    ExitCode.DONE: "all is well",
    ExitCode.FAILED: "list, verify: a checkpoint is damaged; show: a value is not finite;\ndiff: the tensors differ",
    ExitCode.BAD_INPUT: "bad input, or a checkpoint that cannot be read",
    ExitCode.STOPPED: "stopped by a signal",
    ExitCode.INTERRUPTED: "interrupted from the keyboard",
    ExitCode.READER_LEFT: "the reader of the output has left",
}
EPILOG = f"""\
One process does it, and holds one tensor at a time in memory (diff: two)
beside the largest part of it that a rank has written. In JSON, null also
stands for numbers that are not finite.

{table(CODES)}"""
Report = tuple[dict[str, Any], bool]  # for JSON, and whether all is well


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code, one of `CODES`."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, work: Callable[[argparse.Namespace, Terminal], Report], summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.set_defaults(work=work)
        command.add_argument(
            "--json", metavar="FILE", help="write the result as JSON to FILE too; -: to stdout instead"
        )
        return command

    listing = add("list", _list, "all checkpoints of a run, and whether they are there in full")
    listing.add_argument("run", type=Path, metavar="RUN", help="a run folder, or its folder of checkpoints")
    verify = add("verify", _verify, "read checkpoints in full, and compare every file's size and hash")
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint; a run folder: all of them")
    showing = add("show", show, "what a checkpoint holds")
    showing.add_argument("path", type=Path, metavar="PATH", help="a checkpoint; a run folder: its newest")
    showing.add_argument(
        "--values", action="store_true", help="read the tensors: show their norms, and find values that are not finite"
    )
    diffing = add("diff", diff, "how two checkpoints, of any layouts, differ in configuration and tensors")
    diffing.add_argument("a", type=Path, metavar="A", help="a checkpoint; a run folder: its newest")
    diffing.add_argument("b", type=Path, metavar="B", help="another")
    diffing.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="largest difference allowed, relative to a tensor's largest value (default: 0, equal to the bit)",
    )
    indexing = add("index", index, "give checkpoints of an older megalite, or of another program, what loading needs")
    indexing.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint; a run folder: all of them")
    indexing.add_argument(
        "--config",
        nargs="+",
        metavar="YAML",
        help="configuration of the model, needed if another program wrote the folder with torch.distributed.checkpoint",
    )
    for command in (showing, diffing):
        command.add_argument(
            "--tensors", default="*", metavar="PATTERN", help="only tensors of these names, such as 'model.*norm*'"
        )
    return parser


def _run(options: argparse.Namespace) -> int:
    alone = options.json == "-"
    torch.set_num_threads(1)  # enough for small pieces, and a run may need the other cores
    report, well = options.work(options, Terminal(quiet=alone))
    report = json.loads(json.dumps(report), parse_constant=lambda _: None)  # JSON has no NaN and Infinity
    if alone:
        Terminal().text(as_json(report).rstrip("\n"))
    elif options.json is not None:
        write_object(Path(options.json), report)
    return ExitCode.DONE if well else ExitCode.FAILED


def _list(options: argparse.Namespace, terminal: Terminal) -> Report:
    entries = survey(options.run)
    damaged = [number for number, entry in enumerate(entries) if entry.state == "damaged"]
    columns = ("step", "tokens", "saved (UTC)", "layout:", "ranks", "size", "state:")
    terminal.table(columns, map(_row, entries), marked=damaged)
    return {"checkpoints": [_fields(entry) for entry in entries]}, not damaged


def _row(entry: Entry) -> tuple[str, ...]:
    manifest = entry.manifest
    origin = ("", "", "", "")
    if manifest is not None:
        tokens, ranks = ("" if count is None else f"{count:,}" for count in (manifest.tokens, manifest.ranks))
        origin = (tokens, saved_at(manifest), layout_of(manifest), ranks)
    state = f"{entry.state}: {entry.why}" if entry.why else entry.state
    return f"{entry.step:,}", *origin, scaled(entry.bytes, "B"), state


def _fields(entry: Entry) -> dict[str, Any]:
    found = {"path": str(entry.path), "step": entry.step, "state": entry.state, "why": entry.why, "bytes": entry.bytes}
    return found | {name: getattr(entry.manifest, name, None) for name in ("tokens", "saved", "layout", "ranks")}


def _verify(options: argparse.Namespace, terminal: Terminal) -> Report:
    results = []
    for path in [checkpoint for given in options.paths for checkpoint in find(given)]:
        found = _damage(path, own=path not in options.paths)
        if not os.path.lexists(path):
            terminal.line(f"{path}: gone meanwhile: its run goes on, and needs it no longer")
            continue
        terminal.line(f"{path}: damaged: {'; '.join(found)}" if found else f"{path}: intact")
        results.append({"path": str(path), "intact": not found, "damage": found})
    return {"checkpoints": results}, all(result["intact"] for result in results)


def _damage(path: Path, own: bool) -> list[str]:
    """Messages about damage to a checkpoint. own: it is one of a run, and must be in the run's folder."""
    try:
        if own:
            check_folder(path)
        manifest = Manifest.read(path)
    except DamagedError as error:
        return [error.what]
    with bar(path.name, total_bytes(manifest.files.values())) as advanced:
        return damage(path, manifest, advanced)


if __name__ == "__main__":
    sys.exit(main())
