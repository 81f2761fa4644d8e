"""Pictures of how a cluster scales: throughput, efficiency, utilization and memory by layout and number of GPUs."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from megalite.base.errors import counted
from megalite.plan.memory.fit import GIB
from megalite.report.picture import GREY, INK, MARK, Picture, beside, colours, in_legend, kinds, label
from megalite.report.pictures import ticker
from megalite.scaling.rates import axis_value
from megalite.scaling.table import Results, RunResult

SPEED, SPEED_LOW, SPEED_HIGH = (f"tokens_per_second_per_gpu{end}" for end in ("", "_low", "_high"))
MAX_BARS = 60  # bars in the picture of memory


def pictures(results: Results) -> list[Picture]:
    """Pictures of a comparison of systems for which there are numbers."""
    layouts = by_layout(results)
    found = []
    if measured := {name: runs for name, runs in layouts.items() if _with(runs, SPEED)}:
        found.append(_speed(measured))
        several = {
            name: runs for name, runs in measured.items() if len({run.number("gpus") for run in _with(runs, SPEED)}) > 1
        }
        if several:
            found.append(_efficiency(several))
    if used := {name: runs for name, runs in layouts.items() if _with(runs, "mfu_causal", "mfu_full")}:
        found.append(_mfu(used))
    sized = [run for run in results.runs if run.number("peak_memory_bytes") > 0 or run.status == "oom"]
    if any(run.number("peak_memory_bytes") > 0 for run in sized):
        found.append(_memory(sized, results))
    return found


def by_layout(results: Results) -> dict[str, list[RunResult]]:
    """Runs with equal axes, by those axes in words, each in the order of GPUs."""
    shown = [name for name in results.axes if len({run.axes[name] for run in results.runs}) > 1 and "gpu" not in name]
    found: dict[str, list[RunResult]] = {}
    for run in sorted(results.runs, key=lambda run: run.number("gpus")):
        words = ", ".join(f"{name.rpartition('.')[2]} {axis_value(run.axes[name])}" for name in shown)
        found.setdefault(words or "all runs", []).append(run)
    return found


def _with(runs: Sequence[RunResult], *columns: str) -> list[RunResult]:
    return [run for run in runs if any(run.number(column) > 0 for column in columns) and run.number("gpus") > 0]


def _medians(gpus: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """A line: by number of GPUs, the median of the repeats."""
    places = sorted(set(gpus))
    return places, [
        float(np.median([value for each, value in zip(gpus, values, strict=True) if each == place])) for place in places
    ]


def _speed(layouts: dict[str, list[RunResult]]) -> Picture:
    rows: list[list[Any]] = [
        [name, run.slug, run.number("gpus"), run.number(SPEED), run.number(SPEED_LOW), run.number(SPEED_HIGH)]
        for name, runs in layouts.items()
        for run in _with(runs, SPEED)
    ]

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        named = in_legend(len(layouts))
        for at, ((name, runs), colour) in enumerate(zip(layouts.items(), kinds(len(layouts)), strict=True)):
            some = _with(runs, SPEED)
            x, y = [[run.number(column) for run in some] for column in ("gpus", SPEED)]
            below = [
                max(run.number(SPEED) - run.number(SPEED_LOW), 0) if isfinite(run.number(SPEED_LOW)) else 0
                for run in some
            ]
            above = [
                max(run.number(SPEED_HIGH) - run.number(SPEED), 0) if isfinite(run.number(SPEED_HIGH)) else 0
                for run in some
            ]
            axes.errorbar(
                x, y, (below, above), fmt="o", color=colour, capsize=3, label=label(name) if at in named else None
            )
            axes.plot(*_medians(x, y), "-", color=colour)
        _gpus(axes, [row[2] for row in rows])
        axes.set_ylabel("tokens/s per GPU")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        beside(axes)

    told = (
        "Median of the measured steps of each run; whiskers go from the tenth to the ninetieth percentile, and lines "
        "through the median of repeats."
    )
    header = ["layout", "run", "gpus", "tokens_per_second_per_gpu", "low", "high"]
    return Picture("throughput", "Throughput of a GPU", told, header, rows, paint)


def _efficiency(layouts: dict[str, list[RunResult]]) -> Picture:
    rows: list[list[Any]] = []
    for name, runs in layouts.items():
        some = _with(runs, SPEED)
        first = [run.number(SPEED) for run in some if run.number("gpus") == some[0].number("gpus")]
        for run in some:
            rows.append([name, run.number("gpus"), run.number(SPEED) / float(np.median(first))])

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.axhline(1, color=GREY, linestyle="--", label="ideal")
        named = in_legend(len(layouts))
        for at, (name, colour) in enumerate(zip(layouts, kinds(len(layouts)), strict=True)):
            x, y = zip(*[(gpus, share) for layout, gpus, share in rows if layout == name], strict=True)
            axes.plot(x, y, "o", color=colour, label=label(name) if at in named else None)
            axes.plot(*_medians(x, y), "-", color=colour)
        _gpus(axes, [row[1] for row in rows])
        axes.set_ylabel("tokens/s per GPU, relative")
        axes.set_ylim(0, max(1.08, 1.05 * max(row[2] for row in rows)))
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        beside(axes)

    told = (
        "Of each layout, relative to the median on its fewest GPUs; lines go through the median of repeats. "
        "Ideal is to keep the throughput of a GPU."
    )
    return Picture("efficiency", "Efficiency of scaling", told, ["layout", "gpus", "efficiency"], rows, paint)


def _mfu(layouts: dict[str, list[RunResult]]) -> Picture:
    columns = {"mfu_causal": "-", "mfu_full": ":"}
    rows: list[list[Any]] = [
        [name, run.number("gpus"), run.number("mfu_causal"), run.number("mfu_full")]
        for name, runs in layouts.items()
        for run in _with(runs, *columns)
    ]

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        named = in_legend(len(layouts))
        for at, ((name, runs), colour) in enumerate(zip(layouts.items(), kinds(len(layouts)), strict=True)):
            for column, style in columns.items():
                some = [run for run in _with(runs, column) if isfinite(run.number(column))]
                words = label(name) if at in named and style == "-" else None
                x, y = [run.number("gpus") for run in some], [run.number(column) for run in some]
                axes.plot(x, y, "o", color=colour, label=words)
                axes.plot(*_medians(x, y), style, color=colour)
        _gpus(axes, [row[1] for row in rows])
        axes.set_ylabel("MFU")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        beside(axes)

    told = (
        "Model FLOPs utilization: causal attention counted as the half that is computed (solid), or in full, as PaLM "
        "and Megatron-LM count it (dotted)."
    )
    header = ["layout", "gpus", "mfu_causal", "mfu_full"]
    return Picture("mfu", "Model FLOPs utilization", told, header, rows, paint)


def _memory(runs: Sequence[RunResult], results: Results) -> Picture:
    words = {run.id: name for name, some in by_layout(results).items() for run in some}
    shown = sorted(runs, key=lambda run: (words[run.id], run.number("gpus")))[:MAX_BARS]
    rows: list[list[Any]] = [
        [words[run.id], run.number("gpus"), _blank(run.number("peak_memory_bytes")), run.status] for run in shown
    ]

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        layouts = list(dict.fromkeys(row[0] for row in rows))
        counts = sorted({row[1] for row in rows})
        shades = dict(zip(counts, colours(len(counts)), strict=True))
        most = max(row[2] for row in rows if row[2]) / GIB
        thick = 0.8 / len(counts)
        for name, gpus, held, status in rows:
            y = layouts.index(name) + (counts.index(gpus) - (len(counts) - 1) / 2) * thick
            if held:
                axes.barh(y, held / GIB, thick * 0.9, color=shades[gpus])
            if status == "oom":
                axes.plot(held / GIB if held else 0.015 * most, y, "x", color=MARK, markersize=7, mew=2, clip_on=False)
                axes.annotate(
                    "OOM",
                    (held / GIB if held else 0.015 * most, y),
                    (9, 0),
                    textcoords="offset points",
                    va="center",
                    color=INK,
                    fontsize=8,
                )
        for gpus in counts:
            axes.barh([0], [0], color=shades[gpus], label=counted(gpus, "GPU"))
        axes.set_yticks(range(len(layouts)), [label(name) for name in layouts])
        axes.invert_yaxis()
        axes.set_xlabel("GiB at the peak, fullest rank that was recorded")
        axes.grid(axis="y", visible=False)
        beside(axes)

    height = max(2.2, 0.9 + 0.16 * len(rows) + 0.25 * len({row[0] for row in rows}))
    told = "A cross marks what ran out of memory."
    if len(runs) > MAX_BARS:
        told += f" The first {MAX_BARS} of {len(runs)} are drawn."
    return Picture(
        "memory",
        "Memory by layout",
        told,
        ["layout", "gpus", "peak_memory_bytes", "status"],
        rows,
        paint,
        (6.4, height),
    )


def _blank(value: float) -> float | None:
    return value if value > 0 else None


def _gpus(axes: Any, counts: Sequence[float]) -> None:
    axes.set_xscale("log")
    marks = sorted(set(counts))
    axes.xaxis.set_major_locator(ticker.FixedLocator(marks[:: max(1, len(marks) // 8)]))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("GPUs")
