"""Check nodes before a job trains on them.

On one machine, megalite-preflight --full tells whether its GPUs, disk and
software are fit. A job's supervisor runs it on every node at once with --nodes
and --attempt, and compares the files that they leave with --compare.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from ..base.arguments import byte_size, natural, port
from ..base.errors import UserError
from ..base.files import SHARED_MODE, write_whole
from ..base.outcome import DONE, FAILED
from ..base.run_folder import RunFolder, node_name
from .cluster import check_target, write_cluster
from .compare import Verdict, compare, compare_folder
from .findings import NODE, write_sheet
from .node import PREFLIGHT_SECONDS, Order, check_node
from .show import sheet_text, verdict_text
from .storage import checkpoint_bytes
from .thresholds import Thresholds, load_thresholds
from .trainer import Trainer

PORT = 12765  # below the ports that a system gives to programs by itself
CODES = """exit codes:
  0    all checks passed; there may be warnings
  1    a check failed
  2    bad input
  3    stopped by SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2
  130  interrupted by Ctrl-C
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(argv)
    return _compare(options) if options.compare else _check(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megalite-preflight",
        description=__doc__,
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    level = parser.add_mutually_exclusive_group()
    how: dict[str, Any] = {"dest": "level", "action": "store_const", "default": "light"}
    level.add_argument("--light", const="light", **how, help="what takes at most 20 s; the default")
    level.add_argument("--full", const="full", **how, help="measure speeds as well; at most 3 minutes")
    level.add_argument("--level", choices=tuple(PREFLIGHT_SECONDS), default="light", help="the same, as a word")
    add("--run", type=Path, metavar="RUN", help="the run folder, where checkpoints go")
    add("--checkpoints", type=Path, metavar="DIR", help="where checkpoints go, if not into RUN/checkpoints")
    add("--checkpoint-size", metavar="SIZE", help="of one, as in 350GiB; by default that of the newest")
    add("--gpus", type=natural, metavar="N", help="GPUs that a node should have; 0: train on CPUs")
    add("--thresholds", type=Path, metavar="FILE", help="the site's own limits, by key (docs/preflight.md)")
    add("--python", default=shlex.quote(sys.executable), metavar="COMMAND", help="runs the Python that will train")
    add("--json", type=Path, metavar="FILE", help="write all that was found, for programs")
    add("--write-cluster", type=Path, metavar="FILE", help="write measured speeds for megalite plan --cluster FILE")
    add("--cluster", metavar="NAME|FILE", help="the cluster file on which that builds; by default that of the GPUs")
    many = parser.add_argument_group("for the nodes of a job")
    add = many.add_argument
    add("--node", metavar="NAME", help="of this node; by default as Slurm or the system says")
    add("--nodes", metavar="A,B,...", help="all nodes that are checked now; they must reach each other by these names")
    add(
        "--port",
        type=port,
        default=PORT,
        metavar="PORT",
        help=f"at which the first node listens; {PORT} by default",
    )
    add("--attempt", type=Path, metavar="DIR", help="where to write preflight-NODE.json")
    add("--compare", type=Path, metavar="DIR", help="check nothing, but compare the files in DIR")
    sizes = parser.add_argument_group("sizes of what is measured")
    add = sizes.add_argument
    add("--write-size", metavar="SIZE", help="of the file to write; 1 MiB, or 256 MiB in full")
    add("--probe-size", metavar="SIZE", help="of an all-reduce and a copy; 1 GiB, or 16 MiB on CPUs")
    add("--probe-seconds", type=float, default=2.0, metavar="S", help="of matrix products; 2 by default")
    return parser


def _check(options: argparse.Namespace) -> int:
    """Check this node."""
    thresholds = load_thresholds(options.thresholds)
    order = _order(options)
    alone = len(order.nodes) == 1
    if options.write_cluster:
        if not alone:
            raise UserError("--write-cluster: one node of several cannot tell; give it together with --compare")
        if options.level != "full":
            raise UserError("--write-cluster: needs --full, which measures speeds")
        check_target(options.write_cluster)
    sheet = check_node(order, thresholds)
    verdict = compare([sheet], thresholds)
    print(sheet_text(verdict.sheets[sheet.node]), end="", flush=True)
    if options.attempt:
        try:
            write_sheet(options.attempt, sheet)
        except OSError as error:
            raise UserError(f"--attempt {options.attempt}: cannot be written: {error.strerror}") from None
    return _finish(options, verdict, thresholds, verdict.as_json()["nodes"][sheet.node])


def _compare(options: argparse.Namespace) -> int:
    """Compare what nodes have written."""
    thresholds = load_thresholds(options.thresholds)
    if options.write_cluster:
        check_target(options.write_cluster)
    nodes = _nodes(options.nodes) if options.nodes else None
    verdict = compare_folder(options.compare, thresholds, nodes)
    print(verdict_text(verdict), end="")
    return _finish(options, verdict, thresholds, verdict.as_json())


def _finish(options: argparse.Namespace, verdict: Verdict, thresholds: Thresholds, report: Any) -> int:
    if options.json:
        try:
            write_whole(options.json, json.dumps(report, indent=1, allow_nan=False) + "\n", SHARED_MODE)
        except OSError as error:
            raise UserError(f"--json {options.json}: cannot be written: {error.strerror}") from None
    if options.write_cluster:
        write_cluster(verdict, options.write_cluster, options.cluster, thresholds, _trainer(options))
    return FAILED if verdict.bad else DONE


def _order(options: argparse.Namespace) -> Order:
    node = options.node or node_name()
    nodes = _nodes(options.nodes) if options.nodes else [node]
    if not NODE.fullmatch(node):
        raise UserError(f"--node {node!r:.100}: must be a name of letters, digits, dots and dashes")
    if node not in nodes:
        raise UserError(f"--nodes {options.nodes:.200}: {node} is not among them; give --node NAME")
    if options.run is not None and not options.run.is_dir():
        raise UserError(f"--run {options.run}: is no folder; give that of a run")
    folder = options.checkpoints or (options.run and _checkpoints(options.run))
    if folder is not None and not folder.is_dir():
        raise UserError(f"--checkpoints {folder}: is no folder")
    if not 0 <= options.probe_seconds <= 30:
        raise UserError(f"--probe-seconds {options.probe_seconds}: must be from 0 to 30")
    return Order(
        node=node,
        nodes=nodes,
        port=options.port,
        level=options.level,
        gpus=options.gpus,
        folder=folder,
        checkpoint=_size("--checkpoint-size", options.checkpoint_size)
        or (checkpoint_bytes(folder) if folder else None),
        attempts=options.run and RunFolder(options.run).attempts,
        trainer=_trainer(options),
        write_size=_size("--write-size", options.write_size) or (2**28 if options.level == "full" else 2**20),
        probe_size=_size("--probe-size", options.probe_size) or (2**24 if options.gpus == 0 else 2**30),
        probe_seconds=options.probe_seconds,
    )


def _checkpoints(run: Path) -> Path:
    """Return the folder of a run's checkpoints; before the first checkpoint, the run's folder."""
    found = RunFolder(run).checkpoints
    return found.resolve() if found.is_dir() else run.resolve()


def _trainer(options: argparse.Namespace) -> Trainer:
    try:
        words = shlex.split(options.python)
    except ValueError as error:
        raise UserError(f"--python {options.python:.100}: {error}") from None
    if not words:
        raise UserError("--python: names no command")
    return Trainer(tuple(words))


def _nodes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if not NODE.fullmatch(name):
            raise UserError(f"--nodes: {name!r:.100} is no name of a node; give names with commas, without brackets")
    if len(set(names)) < len(names):
        raise UserError("--nodes: a name is there twice")
    return names


def _size(option: str, text: Optional[str]) -> Optional[int]:
    try:
        return byte_size(text) if text else None
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{option}: {error}") from None
