"""Draw the loss curves of a run, or of several to compare, as a picture."""

import argparse
import sys
from pathlib import Path

from megalite.config.errors import InputError
from megalite.entry import exit_code
from megalite.train.records import read_records

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:
    pyplot = None  # type: ignore[assignment]

COMMAND = "megalite-plot-metrics"
CURVES = ("loss", "valid_loss", "grad_norm")
Curve = list[tuple[int, float]]


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: drawn; 2: bad input."""
    return exit_code(COMMAND, lambda: _plot(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=Path, help="PNG, SVG or PDF to write (default: RUN/loss.png of the first run)")
    return parser


def _plot(options: argparse.Namespace) -> None:
    if pyplot is None:
        raise InputError("matplotlib is not installed; pip install 'megalite[plot]'")
    out = options.out or options.runs[0] / "loss.png"
    draw({str(run): read_metrics(run / "metrics.jsonl") for run in options.runs}, out)
    print(out)


def read_metrics(path: Path) -> dict[str, Curve]:
    """The curves that are drawn. Where a run was resumed and repeated a step, the later record counts."""
    curves: dict[str, dict[int, float]] = {}
    for record in read_records(path):
        for name in CURVES:
            if record.get(name) is not None:
                curves.setdefault(name, {})[record["step"]] = record[name]
    return {name: sorted(points.items()) for name, points in curves.items()}


def draw(runs: dict[str, dict[str, Curve]], out: Path) -> None:
    """Training and validation loss over steps, and the gradient norm below."""
    figure, (losses, norms) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for number, (name, curves) in enumerate(runs.items()):
        color = f"C{number}"
        losses.plot(*_axes(curves.get("loss", [])), color=color, alpha=0.6, label=f"{name}, training")
        if valid := curves.get("valid_loss"):
            losses.plot(*_axes(valid), "o-", color=color, label=f"{name}, validation: {valid[-1][1]:.3f} at the end")
        norms.plot(*_axes(curves.get("grad_norm", [])), color=color)
    losses.set_ylabel("loss, nats per token")
    losses.legend(frameon=False)
    norms.set_ylabel("gradient norm")
    norms.set_xlabel("step")
    for axes in (losses, norms):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"{out}: {error}") from None
    finally:
        pyplot.close(figure)


def _axes(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]


if __name__ == "__main__":
    sys.exit(main())
