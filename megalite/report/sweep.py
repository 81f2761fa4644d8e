"""Pictures of a sweep: the bowl of every cell with its vertex, best values by size, and accuracy by loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megalite.report.axes import logarithmic
from megalite.report.found import FoundLaws
from megalite.report.picture import INK, Picture, beside, colours, in_legend, label
from megalite.scaling.downstream import Task
from megalite.scaling.show import amount_text

LINE_POINTS = 60
PANEL = 8  # cells of a panel
PANELS = 6
KEY_NAMES = {"optim.lr": "rate", "batch.global": "batch"}


def pictures(found: FoundLaws) -> list[Picture]:
    """Pictures of a sweep for which there are numbers."""
    made = []
    for scan in found.fit.get("rates", []):
        made.append(_bowls(scan))
        if sum(cell["best"] is not None for cell in scan["cells"]) > 1:
            made.append(_best(scan))
    return made


def _bowls(scan: Mapping[str, Any]) -> Picture:
    cells, key = scan["cells"], scan["key"]
    panels = _panels(cells)

    def paint(figure: Any) -> None:
        across = min(len(panels), 3)
        grid = figure.subplots(-(-len(panels) // across), across, squeeze=False, sharey=len(panels) > 1)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, some) in zip(grid.flat, panels.items(), strict=False):
            named = in_legend(len(some))
            for at, (cell, colour) in enumerate(zip(some, colours(len(some)), strict=True)):
                x, y = np.array(sorted(cell["points"])).T
                words = label(cell["label"].removeprefix(f"{title}, ")) if at in named else None
                axes.plot(x, y, "o", color=colour, label=words, ms=4)
                if cell["best"] is not None:
                    line = np.geomspace(min(cell["near"]), max(cell["near"]), LINE_POINTS)
                    away = np.log(line / cell["best"])
                    axes.plot(line, cell["lowest"] * np.exp(cell["curvature"] * away**2), color=colour, lw=1.1)
                    axes.plot(cell["best"], cell["lowest"], "D", color=INK, markerfacecolor=colour, ms=5.5)
            logarithmic(axes, "x", key, lambda value: f"{value:.2g}")
            axes.set_title(label(title))
            axes.legend(fontsize=7.5)
        for row in grid:
            row[0].set_ylabel("loss, nats per token")

    none = sum(cell["best"] is None for cell in cells)
    told = f"A diamond is the {scan['estimator']}."
    told += f" {none} of {len(cells)} cells have none between measured values." if none else ""
    shown = sum(len(some) for some in panels.values())
    told += f" {shown} of {len(cells)} cells are drawn." if shown < len(cells) else ""
    rows = [[cell["label"], *point, cell["best"]] for cell in cells for point in cell["points"]]
    size = (3.1 * max(min(len(panels), 3), 1.7), 3.5 * -(-len(panels) // 3))
    header = ["cell", key, "loss", "best"]
    return Picture(f"bowls_{KEY_NAMES[key]}", f"Loss by {key}", told, header, rows, paint, size)


def _panels(cells: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """All cells in one panel, or where they are many, one for each value of their first axis."""
    if len(cells) <= PANEL // 2:
        return {"": cells}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        found.setdefault(cell["label"].partition(", ")[0], []).append(cell)
    if max(map(len, found.values())) == 1:
        return {"": cells[:PANEL]}
    return {title: some[:PANEL] for title, some in list(found.items())[:PANELS]}


def _best(scan: Mapping[str, Any]) -> Picture:
    cells, key = [cell for cell in scan["cells"] if cell["best"] is not None], scan["key"]
    laws = {law["family"]: law for law in scan["laws"] if not law["why"]}
    axis = next((law["regressors"][0] for law in laws.values()), "N")
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        others = _others(laws.get(cell["family"]), axis)
        words = ", ".join(
            [cell["family"]] * bool(cell["family"]) + [f"{name} {amount_text(cell[name])}" for name in others]
        )
        groups.setdefault((cell["family"], words), []).append(cell)

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        named = in_legend(len(groups))
        for at, (((family, words), some), colour) in enumerate(zip(groups.items(), colours(len(groups)), strict=True)):
            x = [cell[axis] for cell in some]
            shown = label(words or "vertices") if at in named else None
            axes.plot(x, [cell["best"] for cell in some], "D", color=colour, label=shown)
            if law := laws.get(family):
                line = np.geomspace(min(x), max(x), LINE_POINTS)
                logs = law["constant"][0] + law["exponents"].get(axis, [0.0])[0] * np.log(line)
                for name in _others(law, axis):
                    logs = logs + law["exponents"][name][0] * np.log(some[0][name])
                axes.plot(line, np.exp(logs), color=colour, lw=1.1)
        logarithmic(axes, "x", {"N": "parameters N", "D": "tokens D", "batch": "batch, sequences"}[axis])
        logarithmic(axes, "y", f"best {key}", lambda value: f"{value:.3g}")
        beside(axes)

    rows = [[cell["label"], cell["N"], cell["D"], cell["batch"], cell["best"]] for cell in cells]
    told = "Vertices of cells that have one; lines are power laws through them." if laws else "Vertices; no power law."
    header = ["cell", "N", "D", "batch", "best"]
    return Picture(f"best_{KEY_NAMES[key]}", f"Best {key}", told, header, rows, paint)


def _others(law: Mapping[str, Any] | None, axis: str) -> list[str]:
    """The regressors that are not on the x axis."""
    return [name for name in ("batch", "D", "N") if law and name in law["regressors"] and name != axis]


def downstream(found: FoundLaws) -> list[Picture]:
    """Accuracy of tasks by loss."""
    rows = found.fit.get("downstream", [])
    tasks = [row for row in rows if "sigmoid" in row][:PANELS]
    if not tasks:
        return []

    def paint(figure: Any) -> None:
        across = min(len(tasks), 3)
        grid = figure.subplots(-(-len(tasks) // across), across, squeeze=False)
        for axes in grid.flat[len(tasks) :]:
            axes.set_axis_off()
        for axes, row in zip(grid.flat, tasks, strict=False):
            losses = np.array(row["losses"])
            one, two = row["sigmoid"], row["error_law"]
            task = Task(
                row["name"],
                losses,
                np.array(row["values"]),
                np.array([one["a"], one["b"], one["k"], one["middle"]]),
                np.array([two["most"], two["ln_k"], two["gamma"]]),
            )
            span = float(np.ptp(losses))
            line = np.linspace(losses.min() - 0.3 * span, losses.max() + 0.1 * span, LINE_POINTS)
            axes.plot(line, task.accuracy(line), color=colours(2)[0], label="sigmoid")
            axes.plot(line, 1 - task.error_rate(line), "--", color=colours(2)[1], label="error law")
            axes.plot(losses, row["values"], "o", color=INK, ms=4)
            axes.set_title(label(row["name"]))
            axes.set_xlabel("loss, nats per token")
            axes.legend()
        for each in grid:
            each[0].set_ylabel("accuracy")

    table = [
        [row["name"], loss, value] for row in tasks for loss, value in zip(row["losses"], row["values"], strict=True)
    ]
    told = "A sigmoid of the loss, and the error rate as an exponential of it."
    size = (3.4 * max(min(len(tasks), 3), 1.5), 3.4 * -(-len(tasks) // 3))
    return [Picture("accuracy", "Accuracy by loss", told, ["task", "loss", "accuracy"], table, paint, size)]
