"""Draw the loss curves of a run, or of several to compare, as a picture; or the load of a run's experts."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, printable
from megalite.report.pictures import need_matplotlib, plain, pyplot, save, ticker
from megalite.train.folder.records import read_lines, read_records
from megalite_tools.experiment.plot_load import draw_loads

COMMAND = "megalite-plot-metrics"
CURVES = ("loss", "valid_loss", "grad_norm", "learning_rate", "tokens")
MARKS = {"resumed": ("resumed", ":"), "rollback": ("rolled back", "--")}  # events: words, style of line
Curve = list[tuple[float, float]]
Marks = list[tuple[int, str]]
Map = Callable[[Any], Any]


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _plot(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="PNG, SVG or PDF to write (default: RUN/loss.png of the first run)"
    )
    parser.add_argument(
        "--experts", action="store_true", help="draw how evenly tokens chose experts instead (RUN/expert_load.png)"
    )
    return parser


def _plot(options: argparse.Namespace) -> None:
    need_matplotlib()
    if options.experts:
        if len(options.runs) > 1:
            raise InputError(f"--experts draws a single run, not {len(options.runs)}; call it once for each")
        out = options.out or options.runs[0] / "expert_load.png"
        draw_loads(options.runs[0], out)
        print(printable(str(out)))
        return
    out = options.out or options.runs[0] / "loss.png"
    files = {name: run / "metrics.jsonl" for name, run in zip(names(options.runs), options.runs, strict=True)}
    curves = {name: read_metrics(path) for name, path in files.items()}
    draw(curves, out, {name: read_marks(path) for name, path in files.items()})
    print(printable(str(out)))


def read_metrics(path: Path) -> dict[str, Curve]:
    """The curves to draw. If a resumed run repeated a step, its later record counts."""
    curves: dict[str, dict[float, float]] = {}
    for record in read_records(path):
        for name in CURVES:
            if record.get(name) is not None:
                curves.setdefault(name, {})[record["step"]] = record[name]
    return {name: sorted(points.items()) for name, points in curves.items()}


def read_marks(path: Path) -> Marks:
    """The steps to which a run went back, each with the event."""
    return [(line["step"], line["event"]) for line in read_lines(path) if line.get("event") in MARKS]


def names(runs: Sequence[Path]) -> list[str]:
    """The names of run folders, as short as possible while they differ."""
    paths = [os.path.abspath(run) for run in runs]
    common = os.path.commonpath(list(map(os.path.dirname, paths)))
    return [plain(os.path.relpath(path, common)) for path in paths]


def draw(runs: dict[str, dict[str, Curve]], out: Path, marks: dict[str, Marks] | None = None) -> None:
    """Draw training and validation loss over steps and tokens, and below them gradient norm and learning rate."""
    figure, (losses, norms, rates) = pyplot.subplots(
        3, 1, figsize=(8, 6), sharex=True, height_ratios=(4, 1, 1), layout="constrained"
    )
    for number, (name, curves) in enumerate(runs.items()):
        color = f"C{number}"
        losses.plot(*_axes(curves.get("loss", [])), color=color, alpha=0.6, label=f"{name}, training")
        if valid := curves.get("valid_loss"):
            losses.plot(*_axes(valid), "o-", color=color, label=f"{name}, validation: {valid[-1][1]:.3f} at the end")
        norms.plot(*_axes(curves.get("grad_norm", [])), color=color)
        rates.plot(*_axes(curves.get("learning_rate", [])), color=color)
    _mark(losses, marks or {})
    figure.suptitle(", ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs")
    if (tokens := _same_tokens(list(runs.values()))) is not None:
        top = losses.secondary_xaxis("top", functions=tokens)
        top.set_xlabel("tokens")
        top.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    losses.set_ylabel("loss, nats per token")
    losses.legend(framealpha=0.9, edgecolor="none")  # marks may pass behind it
    norms.set_ylabel("grad norm")
    rates.set_ylabel("lr")
    rates.ticklabel_format(axis="y", scilimits=(-2, 3))
    rates.set_xlabel("step")
    for axes in (losses, norms, rates):
        axes.grid(alpha=0.3)
    figure.align_ylabels()
    save(figure, out)


def _mark(axes: Any, marks: dict[str, Marks]) -> None:
    """Draw lines at steps to which runs went back. The legend has each kind of line once."""
    told = set()
    for number, run in enumerate(marks.values()):
        for step, event in run:
            words, style = MARKS[event]
            axes.axvline(step, color=f"C{number}", linestyle=style, linewidth=1, label=None if event in told else words)
            told.add(event)


def _same_tokens(runs: Sequence[dict[str, Curve]]) -> tuple[Map, Map] | None:
    """Functions from steps to tokens and back, extended in proportion; None if runs differ or lack token counts."""
    curves = [dict(run.get("tokens", [])) for run in runs]
    merged = {step: count for curve in curves for step, count in curve.items()}
    same = all(merged[step] == count for curve in curves for step, count in curve.items())
    points = [(0.0, 0.0), *((float(step), float(count)) for step, count in sorted(merged.items()) if step > 0)]
    rises = all(before[1] < after[1] for before, after in pairwise(points))
    if not all(curves) or not same or not rises or len(points) < 2:
        return None
    last, most = points[-1]
    steps, tokens = _axes([(-last, -most), *points, (2 * last, 2 * most)])
    return partial(numpy.interp, xp=steps, fp=tokens), partial(numpy.interp, xp=tokens, fp=steps)


def _axes(curve: Curve) -> tuple[list[float], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]


if __name__ == "__main__":
    sys.exit(main())
