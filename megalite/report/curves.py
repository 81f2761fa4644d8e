"""Loss curves of an experiment's runs, from their `metrics.jsonl`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from megalite.base.errors import InputError, counted
from megalite.base.files import is_file
from megalite.report.axes import logarithmic
from megalite.report.found import FoundLaws
from megalite.report.picture import Picture, beside, colours, in_legend
from megalite.scaling.show import amount_text, significant
from megalite.scaling.table import RunResult
from megalite.train.folder.records import read_records
from megalite_launch.page.charts import thinned

CURVE_POINTS = 120  # points of a curve in the picture; a page has hundreds of curves
MAX_RUNS = 300
Curve = list[tuple[float, float]]


def pictures(found: FoundLaws) -> tuple[list[Picture], list[str]]:
    """The picture, where runs have metrics, and sentences about files that cannot be read."""
    curves, wrong = dict[str, tuple[RunResult, Curve]](), list[str]()
    for run in found.results.runs[:MAX_RUNS]:
        path = found.folder / "runs" / run.name / "metrics.jsonl"
        if not is_file(path):
            continue
        try:
            points = list(_points(read_records(path)))
        except InputError as error:
            wrong.append(str(error))
            continue
        if len(points) > 1:
            curves[run.name] = run, thinned(sorted(dict(points).items()), CURVE_POINTS)
    if not curves:
        return [], wrong
    by_tokens = all(run.number("batch_global") > 0 and run.number("sequence_length") > 0 for run, _ in curves.values())
    scaled = {
        name: (run, [(step * run.number("batch_global") * run.number("sequence_length"), loss) for step, loss in curve])
        for name, (run, curve) in curves.items()
    }
    return [_picture(found, scaled if by_tokens else curves, by_tokens)], wrong


def _points(records: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    for record in records:
        loss = record.get("loss")
        if loss is not None and loss > 0 and record["step"] > 0:
            yield float(record["step"]), float(loss)


def _picture(found: FoundLaws, curves: dict[str, tuple[RunResult, Curve]], by_tokens: bool) -> Picture:
    sizes = {name: found.size(run) for name, (run, _) in curves.items()}
    known = sorted({round(float(np.log(size)), 2) for size in sizes.values() if size > 0})
    shades = dict(zip(known, colours(len(known)), strict=True))

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        thin = 1.2 if len(curves) < 30 else 0.7
        for name, (_, curve) in curves.items():
            shade = shades.get(round(float(np.log(sizes[name])), 2)) if sizes[name] > 0 else None
            axes.plot(*zip(*curve, strict=True), color=shade or colours(1)[0], lw=thin, alpha=0.85)
        named = in_legend(len(known))
        for at, size in enumerate(known):
            if at in named:
                axes.plot([], [], color=shades[size], label=f"N {amount_text(float(np.exp(size)))}")
        losses = [loss for _, curve in curves.values() for _, loss in curve]
        late = [curve[len(curve) // 10][1] for _, curve in curves.values()]
        if max(losses) > 2 * max(late):  # the first steps would press all that follows flat
            axes.set_ylim(min(losses) * 0.97, max(late) * 1.25)
        logarithmic(axes, "x", "tokens" if by_tokens else "steps")
        logarithmic(axes, "y", "training loss, nats per token", significant)
        beside(axes)

    rows = [[name, *point] for name, (_, curve) in curves.items() for point in curve]
    told = f"Training losses of {counted(len(curves), 'run')}."
    if len(found.results.runs) > MAX_RUNS:
        told += f" The first {MAX_RUNS} runs are drawn."
    header = ["run", "tokens" if by_tokens else "steps", "loss"]
    return Picture("curves", "Loss curves", told, header, rows, paint)
