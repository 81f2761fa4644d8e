"""Pictures of a ladder: losses by size and by tokens, envelope, residuals, hold-out, and the best size by budget."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megalite.base.errors import counted
from megalite.report.axes import flops_text, logarithmic
from megalite.report.found import FoundLaws
from megalite.report.picture import GREY, INK, MARK, Picture, beside, colours, in_legend
from megalite.report.pictures import ticker
from megalite.scaling.bootstrap import interval
from megalite.scaling.forms import Array
from megalite.scaling.law import FLOPS
from megalite.scaling.show import amount_text, significant
from megalite.scaling.table import RunResult

SERIES_TOLERANCE = 0.03  # relative: sizes, tokens, ratios or budgets that differ by less are one series
LAW_POINTS = 60
REACH = 100.0  # times the largest budget, up to which laws are drawn


def pictures(found: FoundLaws) -> list[Picture]:
    """Pictures of a ladder for which there are numbers."""
    runs = found.used
    if len(runs) < 2:
        return []
    made = [_by_size(found), _by_tokens(found), _envelope(found)]
    if found.losses is not None:
        made.append(_residuals(found))
        if found.fit["holdout"]:
            made.append(_held_out(found))
    if found.best is not None:
        made.append(_optimum(found))
    return made


def series(values: Array) -> list[Array]:
    """Indices of values that are equal within SERIES_TOLERANCE, group by group from the lowest."""
    order, found = np.argsort(values, kind="stable"), list[list[int]]()
    for at in order:
        if found and values[at] <= values[found[-1][0]] * (1 + SERIES_TOLERANCE):
            found[-1].append(int(at))
        else:
            found.append([int(at)])
    return [np.array(places) for places in found]


def _levels(
    found: FoundLaws, runs: list[RunResult]
) -> tuple[str, Array, Callable[[float], str], Callable[[float, Array], Array]]:
    """Choose the quantity with the fewest levels among runs: tokens, tokens per parameter or FLOPs.

    Returns its name, its value in each run, the text of a level, and D as a function of level and N.
    """
    n, d = found.column(runs, "N"), found.column(runs, "D")
    choices: list[tuple[str, Array, Callable[[float], str], Callable[[float, Array], Array]]] = [
        ("D", d, amount_text, lambda level, size: np.full_like(size, level)),
        ("D / N", d / n, lambda value: f"{value:.3g}", lambda level, size: level * size),
        ("C", FLOPS * n * d, flops_text, lambda level, size: level / FLOPS / size),
    ]
    return min(choices, key=lambda choice: len(series(choice[1])))


def _by_size(found: FoundLaws) -> Picture:
    runs = found.used
    name, levels, text, tokens_of = _levels(found, runs)
    n, loss = found.column(runs, "N"), found.column(runs, "loss")
    groups = series(levels)

    def of(places: Array) -> tuple[str, Array, Array, Array]:
        level, line = float(np.median(levels[places])), np.geomspace(n.min(), n.max(), LAW_POINTS)
        return f"{name} {text(level)}", line, line, tokens_of(level, line)

    def paint(figure: Any) -> None:
        _with_law(figure, found, groups, n, loss, of, "parameters N")

    rows = [[run.slug, x, level, y] for run, x, level, y in zip(runs, n, levels, loss, strict=True)]
    told = f"Final losses of fitted runs, by {name}. Lines are {_line(found)}."
    return Picture("loss_by_size", "Loss by size", told, ["run", "N", name, "loss"], rows, paint)


def _by_tokens(found: FoundLaws) -> Picture:
    runs = found.used
    n, d, loss = (found.column(runs, name) for name in ("N", "D", "loss"))
    groups = series(n)

    def of(places: Array) -> tuple[str, Array, Array, Array]:
        size, line = float(np.median(n[places])), np.geomspace(d[places].min() / 1.3, d[places].max() * 1.3, LAW_POINTS)
        return f"N {amount_text(size)}", line, np.full_like(line, size), line

    def paint(figure: Any) -> None:
        _with_law(figure, found, groups, d, loss, of, "tokens D")

    rows = [[run.slug, *values] for run, values in zip(runs, np.stack([n, d, loss], 1).tolist(), strict=True)]
    told = f"Final losses of fitted runs, by size. Lines are {_line(found)}."
    return Picture("loss_by_tokens", "Loss by tokens", told, ["run", "N", "D", "loss"], rows, paint)


def _with_law(
    figure: Any,
    found: FoundLaws,
    groups: Sequence[Array],
    x: Array,
    loss: Array,
    of: Callable[[Array], tuple[str, Array, Array, Array]],
    title: str,
) -> None:
    """Losses over `x`, a colour for each group. of: its words, and x, N and D of the law's line."""
    axes, named = figure.add_subplot(), in_legend(len(groups))
    for at, (places, colour) in enumerate(zip(groups, colours(len(groups)), strict=True)):
        words, line, sizes, tokens = of(places)
        axes.plot(x[places], loss[places], "o", color=colour, label=words if at in named else None)
        if found.losses is not None:
            axes.plot(line, found.losses[0].loss(sizes, tokens), color=colour, lw=1.1)
        elif len(places) > 1:
            order = places[np.argsort(x[places])]
            axes.plot(x[order], loss[order], color=colour, lw=1.1)
    logarithmic(axes, "x", title)
    logarithmic(axes, "y", "loss, nats per token", significant)
    beside(axes)


def _line(found: FoundLaws) -> str:
    return "the fitted law" if found.losses is not None else "no law: megalite-sweep fit makes one"


def _envelope(found: FoundLaws) -> Picture:
    runs = found.used
    n, d, loss = (found.column(runs, name) for name in ("N", "D", "loss"))
    flops, groups = FLOPS * n * d, series(n)
    drawn = found.main("approach1").get("envelope")

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        named = in_legend(len(groups))
        for at, (places, colour) in enumerate(zip(groups, colours(len(groups)), strict=True)):
            order = places[np.argsort(flops[places])]
            words = f"N {amount_text(float(np.median(n[places])))}" if at in named else None
            axes.plot(flops[order], loss[order], "o-", color=colour, lw=1.1, label=words)
        if drawn:
            axes.plot(drawn["flops"], drawn["loss"], color=INK, lw=2.4, alpha=0.55, label="envelope")
        if found.losses is not None:
            line = np.geomspace(flops.min(), flops.max() * REACH, LAW_POINTS)
            law, several = found.losses
            axes.plot(line, law.best_loss(line), "--", color=INK, lw=1.3, label="best by the law")
            if several is not None:
                bands = [interval(0, np.asarray(several.best_loss(at)), len(runs)) for at in line]
                axes.fill_between(line, [b.low for b in bands], [b.high for b in bands], color=GREY, alpha=0.3, lw=0)
        logarithmic(axes, "x", "FLOPs, 6·N·D", flops_text)
        logarithmic(axes, "y", "loss, nats per token", significant)
        beside(axes)

    rows = [[run.slug, *values] for run, values in zip(runs, np.stack([n, flops, loss], 1).tolist(), strict=True)]
    told = "Final losses by FLOPs"
    if drawn:
        told += "; the wide line is the envelope of approach 1"
    if found.losses is not None:
        told += (
            f"; the broken one is the lowest loss that the law gives for a budget, up to {REACH:g} times the largest"
        )
        told += ", with its band" if found.losses[1] is not None else ""
    return Picture("envelope", "Loss by FLOPs", told + ".", ["run", "N", "flops", "loss"], rows, paint)


def _residuals(found: FoundLaws) -> Picture:
    assert found.losses is not None
    runs, law = found.used, found.losses[0]
    n, d, loss = (found.column(runs, name) for name in ("N", "D", "loss"))
    off, groups = loss / law.loss(n, d) - 1, series(n)

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
        named = in_legend(len(groups))
        for at, (places, colour) in enumerate(zip(groups, colours(len(groups)), strict=True)):
            words = f"N {amount_text(float(np.median(n[places])))}" if at in named else None
            left.plot(FLOPS * n[places] * d[places], off[places], "o", color=colour, label=words)
        left.axhline(0, color=GREY, lw=1)
        logarithmic(left, "x", "FLOPs, 6·N·D", flops_text)
        left.set_ylabel("measured / law - 1")
        left.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        right.hist(off, bins=min(24, max(6, len(off) // 4)), orientation="horizontal", color=GREY, alpha=0.7)
        right.set_xlabel("runs")
        right.grid(axis="y", visible=True)
        right.legend(*left.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)

    rows = [[run.slug, *values] for run, values in zip(runs, np.stack([n, d, off], 1).tolist(), strict=True)]
    told = "How far measured losses are from the law. A pattern by size or budget says that the law has the wrong form."
    return Picture("residuals", "Residuals", told, ["run", "N", "D", "measured_by_law_minus_1"], rows, paint)


def _held_out(found: FoundLaws) -> Picture:
    rows = found.fit["holdout"]

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        shades = dict(
            zip(sorted({row["rung"] for row in rows}), colours(len({row["rung"] for row in rows})), strict=True)
        )
        losses = [row["measured"] for row in rows] + [row["predicted"][0] for row in rows]
        left.plot([min(losses), max(losses)], [min(losses), max(losses)], color=GREY, lw=1)
        for row in rows:
            value, low, high = row["predicted"]
            bars = [[value - low], [high - value]] if low is not None else None
            shade = shades[row["rung"]]
            left.errorbar([row["measured"]], [value], bars, fmt="o", color=shade, capsize=2.5)
            right.plot([row["times"]], [row["error"]], "o", color=shade)
        for rung, shade in shades.items():
            right.plot([], [], "o", color=shade, label=rung)
        left.set_xlabel("measured loss")
        left.set_ylabel("predicted loss")
        right.axhline(0, color=GREY, lw=1)
        logarithmic(right, "x", "FLOPs / largest fitted", lambda value: f"{value:.3g}")
        right.set_ylabel("predicted / measured - 1")
        right.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        beside(right)

    inside = [row["inside"] for row in rows if row["inside"] is not None]
    told = "Runs of rungs that no fit has seen. Whiskers are the interval of a single run."
    if inside:
        told += f" {sum(inside)} of {len(inside)} lie inside."
    table = [[r["slug"], r["parameters"], r["tokens"], r["measured"], *r["predicted"], r["error"]] for r in rows]
    header = ["run", "N", "D", "measured", "predicted", "low", "high", "error"]
    return Picture("holdout", "Predicted and held out", told, header, table, paint, (7.2, 3.4))


def _optimum(found: FoundLaws) -> Picture:
    assert found.best is not None
    law, several = found.best
    runs = found.used
    flops = FLOPS * found.column(runs, "N") * found.column(runs, "D")
    line = np.geomspace(flops.min(), flops.max() * REACH, LAW_POINTS)
    values = [np.asarray(each) for each in law.optimum(line)]
    bands: list[list[Any]] = [[], []]
    if several is not None:
        for at in line:
            for band, each in zip(bands, several.optimum(at), strict=True):
                band.append(interval(1.0, np.asarray(each), len(runs), True))
    budgets = [each for each in found.main("approach2").get("budgets", []) if not each["why"]]

    def paint(figure: Any) -> None:
        pair = figure.subplots(1, 2)
        for side, (axes, name) in enumerate(zip(pair, ("N_opt", "D_opt"), strict=True)):
            axes.plot(line, values[side], color=colours(2)[side], label="law")
            if bands[side]:
                low, high = [b.low for b in bands[side]], [b.high for b in bands[side]]
                axes.fill_between(line, low, high, color=colours(2)[side], alpha=0.22, lw=0)
            if budgets:
                x, best = np.array([(each["flops"], each["best"]) for each in budgets]).T
                y = best if side == 0 else x / FLOPS / best
                axes.plot(x, y, "D", color=INK, markersize=4.5, label="isoFLOP vertices")
            axes.axvline(flops.max(), color=GREY, ls=":", lw=1.2, label="largest budget")
            logarithmic(axes, "x", "FLOPs, 6·N·D", flops_text)
            logarithmic(axes, "y", {"N_opt": "best N, parameters", "D_opt": "best D, tokens"}[name])
        beside(pair[1])

    rows = []
    for at, budget in enumerate(line):
        ends = [(band[at].low, band[at].high) if band else (None, None) for band in bands]
        rows.append([budget, values[0][at], *ends[0], values[1][at], *ends[1]])
    told = f"By {found.settings.method}; right of the dotted line it is extrapolation."
    if several is not None:
        told += " Bands are intervals from draws of runs."
    header = ["flops", "n_opt", "n_low", "n_high", "d_opt", "d_low", "d_high"]
    return Picture("optimum", "Best size and tokens by budget", told, header, rows, paint, (7.2, 3.4))


def isoflop(found: FoundLaws) -> list[Picture]:
    """The parabolas of approach 2."""
    budgets = [each for each in found.main("approach2").get("budgets", []) if len(each["runs"]) > 1]
    by_id = {run.id: run for run in found.used}
    budgets = [each for each in budgets if all(name in by_id for name in each["runs"])]
    if not budgets:
        return []
    rows: list[Sequence[Any]] = []
    for each in budgets:
        for name in each["runs"]:
            rows.append([each["flops"], by_id[name].slug, found.size(by_id[name]), by_id[name].number(found.which)])

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        named = in_legend(len(budgets))
        for at, (each, colour) in enumerate(zip(budgets, colours(len(budgets)), strict=True)):
            runs = [by_id[name] for name in each["runs"]]
            n, loss = found.column(runs, "N"), found.column(runs, "loss")
            axes.plot(n, loss, "o", color=colour, label=f"C {flops_text(each['flops'])}" if at in named else None)
            if not each["why"]:
                line = np.geomspace(n.min(), n.max(), LAW_POINTS)
                curve = each["lowest"] + each["curvature"] * (np.log(line) - np.log(each["best"])) ** 2
                axes.plot(line, curve, color=colour, lw=1.1)
                axes.plot(each["best"], each["lowest"], "D", color=INK, markersize=5, markerfacecolor=MARK)
        logarithmic(axes, "x", "parameters N")
        axes.set_ylabel("loss, nats per token")
        beside(axes)

    none = sum(bool(each["why"]) for each in budgets)
    told = "A parabola of the loss over ln N for every budget; diamonds are vertices, the best sizes."
    told += f" {counted(none, 'budget')} without one: see the table of approaches." if none else ""
    return [Picture("isoflop", "IsoFLOP parabolas", told, ["flops", "run", "N", "loss"], rows, paint)]


def pairs(found: FoundLaws) -> list[Picture]:
    """The draws of the law's parameters, against each other."""
    if found.losses is None or found.losses[1] is None:
        return []
    law, several = found.losses
    names = [name for name in ("E", "alpha", "beta", "alpha_n", "alpha_d", "exponent") if hasattr(several, name)]
    values = {name: np.asarray(getattr(several, name), float) for name in names}
    whole = np.all([np.isfinite(each) for each in values.values()], axis=0)
    values = {name: each[whole] for name, each in values.items()}
    shown = slice(None, None, max(1, int(whole.sum()) // 250))
    words = {"exponent": "a", "alpha_n": "alpha_N", "alpha_d": "alpha_D"}

    def paint(figure: Any) -> None:
        grid = figure.subplots(len(names), len(names), squeeze=False)
        for row, below in enumerate(names):
            for column, beside_ in enumerate(names):
                axes = grid[row][column]
                axes.grid(False)
                axes.tick_params(labelsize=7)
                axes.locator_params(nbins=3)
                if column > row:
                    axes.set_axis_off()
                elif column == row:
                    axes.hist(values[below], bins=24, color=colours(1)[0], alpha=0.75)
                    axes.axvline(float(getattr(law, below)), color=MARK, lw=1.2)
                    axes.set_yticks([])
                else:
                    axes.plot(values[beside_][shown], values[below][shown], ".", color=colours(1)[0], ms=2.5, alpha=0.6)
                    axes.plot(float(getattr(law, beside_)), float(getattr(law, below)), "+", color=MARK, ms=9, mew=1.6)
                if row == len(names) - 1:
                    axes.set_xlabel(words.get(beside_, beside_))
                else:
                    axes.set_xticklabels([])
                if column == 0 and row:
                    axes.set_ylabel(words.get(below, below))
                elif column:
                    axes.set_yticklabels([])

    rows = list(zip(*(values[name].tolist() for name in names), strict=True))
    told = (
        "Every dot is a fit to a draw of the runs; red is the fit to all. Narrow slopes are parameters that trade off."
    )
    return [
        Picture("bootstrap", "Draws of the parameters", told, [words.get(n, n) for n in names], rows, paint, (6, 5.4))
    ]
