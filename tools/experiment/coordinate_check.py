"""Coordinate check: whether outputs of modules stay as large when a model gets wider, or deeper.

Small models of several widths, or depths, take a few steps. The mean absolute value of every module's outputs is
measured. The slope of its logarithm on that of the width must be within ±0.25 after the last step (Yang et al. 2022,
arXiv 2203.03466, appendix D.1).
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.exit_codes import table as exit_codes
from megalite.base.files import check_output, write_object
from megalite.base.stop_signals import ended_at_once
from megalite.base.terminal import console, sections
from megalite.config.load import files_and_overrides, load
from megalite.config.model_schema import Model
from megalite.config.rules.validate import check
from megalite.config.schema import Config, LearningRate
from megalite.cost.order_costs import costing_of
from megalite.distributed.start.host import on_cpus
from megalite.distributed.start.local import launch
from megalite.distributed.start.ranks import RankInfo, find_rank_info
from megalite.distributed.start.signals import end_when_stopped
from megalite.distributed.start.start import run_rank, start
from megalite.plan.memory.fit import planned
from megalite.report.pictures import need_matplotlib, save
from megalite.train.build import build_mesh
from megalite_launch.base.arguments import count
from megalite_tools.experiment.coordinate_report import TOLERANCE, Line, picture
from megalite_tools.experiment.coordinates import MODULES, Sizes, sizes_in_training

COMMAND, MODULE = "megalite-coordinate-check", "megalite_tools.experiment.coordinate_check"
MEANINGS = {
    ExitCode.DONE: "all slopes are near 0",
    ExitCode.FAILED: "some are not, or the control's are",
    ExitCode.BAD_INPUT: "the configuration or the command line is wrong",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command, or one of its ranks. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(COMMAND, lambda: _main(arguments, _parser().parse_intermixed_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=fill(" ".join((__doc__ or "").split()), 78),
        epilog=exit_codes(MEANINGS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="*", metavar="CONFIG | key=value", help="as for megalite train; data are not read")
    add("--widths", type=_numbers, metavar="N,…", help="model.width of the models (default: 64,128,256,512)")
    add("--depths", type=_numbers, metavar="N,…", help="model.layers of the models, which then have one width")
    add("--steps", type=count, default=6, metavar="N", help="optimizer steps (default: %(default)s)")
    add("--seeds", type=count, default=2, metavar="N", help="repetitions, of which means are taken (default: 2)")
    add(
        "--grow",
        choices=("heads", "head-width"),
        default="heads",
        help="what a wider model has more of (default: heads)",
    )
    add("--control", action="store_true", help="the standard parametrization too, whose slopes must not be near 0")
    add(
        "--out", default="coordinate_check", metavar="PATH", help="writes PATH.png and PATH.json (default: %(default)s)"
    )
    return parser


def _main(arguments: list[str], options: argparse.Namespace) -> int:
    need_matplotlib()
    rank_info = find_rank_info()
    world_size = None if rank_info is None else rank_info.world_size
    config = check(load(*files_and_overrides(options.inputs)), world_size)
    runs = list(_runs(config, options))
    for suffix in (".png", ".json"):
        check_output(_output(options, suffix))
    if rank_info is not None:
        end_when_stopped(rank_info)
        return run_rank(lambda: _rank(rank_info, arguments, options, config, runs), rank_info)
    with ended_at_once():
        shared = MODULE if on_cpus(config.run.device) else None
        return launch(MODULE, arguments, config.parallel.layout.world_size, shared=shared)


@dataclass(frozen=True)
class CoordinateRun:
    """One model that is to be trained."""

    axis: str
    point: int
    config: Config


def _runs(config: Config, options: argparse.Namespace) -> Iterator[CoordinateRun]:
    """All runs in order. Raises InputError for models that cannot be."""
    kinds = [config.model.parametrization]
    if options.control:
        if kinds == ["standard"]:
            raise InputError("--control: compares with model.parametrization = standard, which is checked already")
        kinds.append("standard")
    widths = options.widths or (None if options.depths else (64, 128, 256, 512))
    axes = (("width", widths or (), _wider), ("depth", options.depths or (), _deeper))
    for axis, points, changed in axes:
        for kind in kinds if points else ():
            model = replace(config.model, parametrization=kind)
            for point in points:
                scaled = replace(
                    config,
                    model=changed(model, point, options),
                    train=replace(config.train, steps=options.steps + 1, compile=False),
                    schedule=LearningRate("constant"),
                    batch=replace(config.batch, rampup=None, curriculum=None),
                )
                try:
                    found = planned(check(scaled), costing_of(scaled))
                except InputError as error:
                    raise InputError(f"--{axis}s {point}: {error}") from None
                for seed in range(options.seeds):
                    yield CoordinateRun(axis, point, replace(found, run=replace(found.run, seed=seed)))


def _wider(model: Model, width: int, options: argparse.Namespace) -> Model:
    """The model at another width, its feed-forward and the number or width of its heads (`grow`) in proportion.

    Raises InputError if one would not be a whole number.
    """
    model = replace(model, head_width=model.head_size)
    sizes: dict[str, Any] = {"width": width}
    for name in ("heads", "kv_heads", "ffn") if options.grow == "heads" else ("head_width", "ffn"):
        full = getattr(model, name)
        sizes[name], rest = divmod(full * width, model.width)
        if rest or not sizes[name]:
            rule = f"model.{name} = {full} would be {full * width / model.width:g}, with model.width = {model.width}"
            raise InputError(f"--widths {width}: {rule}; use widths at which it is a whole number")
    return replace(model, **sizes)


def _deeper(model: Model, layers: int, options: argparse.Namespace) -> Model:
    return replace(model, layers=layers)


def _rank(
    rank_info: RankInfo,
    arguments: Sequence[str],
    options: argparse.Namespace,
    config: Config,
    runs: Sequence[CoordinateRun],
) -> int:
    """Be one rank. The first one reports the results."""
    device = start(rank_info, config.run.device, config.train.timeout)
    mesh = build_mesh(config, device)
    if mesh is None:
        raise InputError(f"{config.parallel.layout} takes fewer ranks than there are; start as many as it takes")
    measured: list[list[Sizes]] = []
    with _progress(len(runs), rank_info.rank == 0) as advance:
        for run in runs:
            measured.append(sizes_in_training(run.config, mesh, options.steps))
            advance()
    lines = list(_lines(runs, measured, config.model.parametrization))
    if rank_info.rank == 0:
        _tell(lines, config, options, shlex.join([COMMAND, *arguments]))
    return ExitCode.DONE if all(line.passed for line in lines) else ExitCode.FAILED


def _lines(runs: Sequence[CoordinateRun], measured: Sequence[list[Sizes]], checked: str) -> Iterator[Line]:
    """The means over seeds, by axis and parametrization; all but `checked` are controls."""
    found: dict[tuple[str, str], dict[int, list[list[Sizes]]]] = {}
    for run, sizes in zip(runs, measured, strict=True):
        line = found.setdefault((run.axis, run.config.model.parametrization), {})
        line.setdefault(run.point, []).append(sizes)
    for (axis, kind), points in found.items():
        steps = range(len(measured[0]))

        def mean(module: str, step: int, seeds: list[list[Sizes]]) -> float:
            return float(np.mean([seed[step][module] for seed in seeds]))

        means = {
            module: [[mean(module, step, seeds) for seeds in points.values()] for step in steps] for module in MODULES
        }
        yield Line(axis, kind, tuple(points), means, kind != checked)


def _tell(lines: Sequence[Line], config: Config, options: argparse.Namespace, command: str) -> None:
    """Print tables and verdicts, and write the files."""
    on = console()
    sections(on, [(line.title, line.table()) for line in lines])
    on.print()
    for line in lines:
        on.print(Text(line.verdict, "" if line.passed else "red"), soft_wrap=True)
    about = {"command": command, "layout": str(config.parallel.layout), "tolerance": TOLERANCE}
    report = {**about, "seeds": options.seeds, "lines": [line.as_json() for line in lines]}
    image, numbers = (_output(options, suffix) for suffix in (".png", ".json"))
    write_object(numbers, report)
    save(picture(lines), image)
    on.print(f"Written: {image} and {numbers}.", soft_wrap=True)


def _output(options: argparse.Namespace, suffix: str) -> Path:
    return Path(f"{options.out}{suffix}")


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if that is a terminal. Yields a function to call after each run."""
    told = Console(stderr=True)
    columns = TextColumn("models"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=told, transient=True, disable=not (shown and told.is_terminal)) as progress:
        task = progress.add_task("models", total=total)
        yield lambda: progress.advance(task)


def _numbers(text: str) -> tuple[int, ...]:
    found = [count(word) for word in text.split(",")]
    if len(set(found)) < 2 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be two or more different numbers, as 64,128,256")
    return tuple(sorted(found))


if __name__ == "__main__":
    sys.exit(main())
