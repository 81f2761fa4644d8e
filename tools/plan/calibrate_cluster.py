"""Fit a cluster file to measured runs: matrix products, memory, node and network.

From each run folder come the configuration of its latest start and the median time
of its steps. Only figures that the runs can tell apart are fitted: one run tells one.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, listing
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_output, exists, write_new
from megalite.config.yaml import read_mapping
from megalite.cost.cluster import Cluster, cluster_path, read_cluster
from megalite.cost.constants import FITTED_CONSTANTS
from megalite_launch.base.texts import seconds_text
from megalite_tools.plan.calibration import FIGURES, Fit, Runs, fit
from megalite_tools.plan.measured_runs import MeasuredRun, read_run
from megalite_tools.terminal import Terminal

COMMAND = "megalite-calibrate-cluster"


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    add = parser.add_argument
    add("cluster", metavar="CLUSTER", help="where the runs were made: the name of a cluster, or its file")
    add("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    add("--out", required=True, metavar="FILE", help="the cluster file to write, which must not be there yet")
    return parser


def _run(options: argparse.Namespace) -> int:
    _check_out(options.out)
    path = cluster_path(options.cluster, "")
    cluster = read_cluster(path)
    runs = Runs([read_run(folder) for folder in options.runs], cluster)
    found = fit(runs)
    _show(Terminal(), runs, cluster, found)
    write_new(Path(options.out), _text(path, found, options.runs))
    return ExitCode.DONE


def _check_out(out: str) -> None:
    if not out.endswith((".yaml", ".yml")):
        raise InputError(f"--out {out}: must end in .yaml")
    if exists(out):
        raise InputError(f"--out {out}: there is such a file already; give another name")
    check_output(Path(out))


def _show(terminal: Terminal, runs: Runs, cluster: Cluster, found: Fit) -> None:
    rows, spread = [], FITTED_CONSTANTS.spread
    predicted = runs.predicted(found.cluster)
    far = [str(run.folder) for run, now in zip(runs.runs, predicted, strict=True) if _off(run, now) > spread]
    for run, before, after in zip(runs.runs, runs.predicted(cluster), predicted, strict=True):
        errors = [f"{each / run.seconds - 1:+.1%}" for each in (before, after)]
        cells = [seconds_text(seconds) for seconds in (run.seconds, before, after)]
        rows.append((str(run.folder), cells[0], cells[1], errors[0], cells[2], errors[1]))
    terminal.table(("run:", "measured", "predicted before", "error", "predicted now", "error"), rows)
    if far:
        terminal.line(
            f"{listing(far, 'and')}: still off by more than the ±{spread:.0%} of predictions; "
            "no factors suit all of the runs, so look at what slows one of them down, or leave it out"
        )
    terminal.table(
        ("figure:", "factor", "why not:"),
        [
            (name, f"{found.factors[name]:.3f}" if name in found.factors else "kept", found.kept.get(name, ""))
            for name in FIGURES
        ],
    )


def _off(run: MeasuredRun, predicted: float) -> float:
    """Factor by which a prediction is too long or too short, less one."""
    return max(predicted / run.seconds, run.seconds / predicted) - 1


def _text(path: Path, found: Fit, runs: list[Path]) -> str:
    """The new file: the old one's keys, with other figures, and sources that name the runs."""
    fields = read_mapping(path)
    gpu, cluster = fields["gpu"], found.cluster
    changed: dict[str, list[str]] = {
        "gpu.measured": ["gpu.measured"],
        "gpu.bandwidth": ["gpu.bandwidth"],
        "node.bandwidth": ["node.bandwidth", *(["island.bandwidth"] if fields.get("island") else [])],
        "network.bandwidth": ["network.bandwidth"],
    }
    if "gpu.measured" in found.factors:
        gpu["measured"] = {precision: _digits(rate / 1e12) for precision, rate in cluster.gpu.measured.items()}
    if "gpu.bandwidth" in found.factors:
        gpu["bandwidth"] = _digits(cluster.gpu.bandwidth / 1e9)
    links: dict[str, Any] = {"node": cluster.levels[-1].link, "network": cluster.network}
    if fields.get("island"):
        links["island"] = cluster.levels[0].link
    for section, link in links.items():
        fields[section]["bandwidth"] = _digits(link.bandwidth / 1e9)
        if link.measured:
            fields[section]["measured"] = _digits(link.measured / 1e9)
    sources = fields["sources"]
    for name, factor in found.factors.items():
        for key in changed[name]:
            before = sources.get(key, "an assumption of the planner")
            names = listing([str(run) for run in runs], "and")
            sources[key] = f"{before}; times {factor:.4f}, as {COMMAND} fitted it to {names}"
    return f"# {path.name}, fitted to measured runs.\n" + yaml.safe_dump(
        fields, sort_keys=False, allow_unicode=True, width=1000
    )


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


if __name__ == "__main__":
    sys.exit(main())
