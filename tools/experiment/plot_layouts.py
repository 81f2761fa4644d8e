"""Draw the losses of runs that differ in nothing but their layout, and how far each is from the first."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.report.pictures import need_matplotlib, plain, pyplot, save
from megalite.train.folder.records import read_records

COMMAND = "python -m megalite_tools.experiment.plot_layouts"
Losses = dict[int, float]  # by step


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder; its name is the label of its curve"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="SVG, PNG or PDF to write")
    return exit_code(COMMAND, lambda: _plot(parser.parse_args(argv)))


def _plot(options: argparse.Namespace) -> None:
    need_matplotlib()
    losses = {plain(run.name): read_losses(run) for run in options.runs}
    draw(losses, options.out)
    for name, distance in distances(list(losses.values())).items():
        print(f"{list(losses)[name]:<40} largest difference {max(distance.values(), default=0.0):.1e}")


def read_losses(run: Path) -> Losses:
    """The losses of a run. If a step was repeated after a resume, its later record counts."""
    path = run / "metrics.jsonl"
    found = {record["step"]: record["loss"] for record in read_records(path) if record.get("loss") is not None}
    if not found:
        raise InputError(f"{path}: has no losses; give the folder of a run that has trained")
    return found


def distances(losses: Sequence[Losses]) -> dict[int, Losses]:
    """Distance of every other run from the first: |loss / loss of the first run − 1| at the steps that both have."""
    first, *others = losses
    return {
        number: {step: abs(loss / first[step] - 1) for step, loss in run.items() if step in first}
        for number, run in enumerate(others, start=1)
    }


def draw(losses: dict[str, Losses], out: Path) -> None:
    """Draw loss curves above, the first one widest so that all can be seen, and distances below."""
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for number, (name, run) in enumerate(losses.items()):
        width = 1.2 + 1.6 * (len(losses) - 1 - number)
        above.plot(list(run), list(run.values()), color=f"C{number}", linewidth=width, label=name)
    for number, run in distances(list(losses.values())).items():
        below.plot(list(run), list(run.values()), color=f"C{number}")
    above.set_ylabel("loss, nats per token")
    above.legend(frameon=False)
    below.set_yscale("symlog", linthresh=1e-8, linscale=0.6)  # losses that agree to the bit are at 0
    below.set_ylim(bottom=0)
    below.set_ylabel("relative difference\nto the first")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    save(figure, out)


if __name__ == "__main__":
    sys.exit(main())
