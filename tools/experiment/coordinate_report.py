"""Findings of a coordinate check: slopes, verdicts, tables and a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from megalite.base.errors import listing
from megalite.base.terminal import table
from megalite.report.pictures import pyplot, ticker
from megalite_tools.experiment.coordinates import MODULES

TOLERANCE = 0.25  # distance of a slope from 0, at most
LATE_MODULES = (
    "logits",
    "attention logits",
)  # begin with slopes of −0.5: logits by muP's factor 1/m, the others in wider heads
CONTROL_SLOPE = 0.5  # the slope that some module of the control must have


@dataclass(frozen=True)
class Line:
    """Measurements of one parametrization along one axis."""

    axis: str  # width or depth
    parametrization: str
    points: tuple[int, ...]  # widths, or depths
    means: Mapping[str, Sequence[Sequence[float]]]  # by module: of every step, the mean absolute output at each point
    control: bool = False

    def slopes(self, module: str) -> list[float]:
        """The slope at every step: how ln of the mean grows with ln of the width or depth. NaN if it is not finite."""
        return [slope(self.points, means) for means in self.means[module]]

    def within(self, module: str) -> bool:
        """Return whether the slope after the last step is near 0."""
        return abs(self.slopes(module)[-1]) <= TOLERANCE  # not so of NaN

    @property
    def steepest(self) -> float:
        """The largest slope of a module after the last step; infinite where values were not finite."""
        found = [abs(self.slopes(module)[-1]) for module in MODULES]
        return math.inf if any(map(math.isnan, found)) else max(found)

    @property
    def passed(self) -> bool:
        """Flag: all slopes are near 0, or if this is the control, one is not."""
        return self.steepest >= CONTROL_SLOPE if self.control else all(map(self.within, MODULES))

    @property
    def verdict(self) -> str:
        """Result of the check in words."""
        begin = f"{self.parametrization}, by {self.axis}:"
        if self.control:
            rule = f"the largest slope of this control is {self.steepest:.2f}; it must be at least {CONTROL_SLOPE}"
            return f"{begin} {rule}{'' if self.passed else ', or the check tells nothing'}."
        missed = [module for module in MODULES if not self.within(module)]
        if not missed:
            return f"{begin} all slopes are within ±{TOLERANCE}."
        told = f"{begin} slopes of {listing(missed, 'and')} are not within ±{TOLERANCE}."
        if set(missed) <= set(LATE_MODULES) and all(self.slopes(module)[-1] < 0 for module in missed):
            told += " They begin with −0.5, until training has changed them: take more --steps or a larger optim.lr."
        return told

    def as_json(self) -> dict[str, Any]:
        """The line for JSON; numbers that are not finite are null."""
        modules = {
            module: {
                "means": [[_number(value) for value in means] for means in self.means[module]],
                "slopes": [_number(value) for value in self.slopes(module)],
                "within": self.within(module),
            }
            for module in MODULES
        }
        about = {"axis": self.axis, "parametrization": self.parametrization, "control": self.control}
        return {**about, "points": list(self.points), "passed": self.passed, "modules": modules}

    def table(self) -> Any:
        """Slopes by module and step, with verdicts but for the control."""
        steps = range(len(self.means[MODULES[0]]))
        rows = table("output of", *(f"step {step}" for step in steps), "", text=("output of", ""))
        for module in MODULES:
            verdict = Text("ok", "green") if self.within(module) else Text("too steep", "red")
            slopes = (f"{found:+.2f}" for found in self.slopes(module))
            rows.add_row(module, *slopes, "" if self.control else verdict)
        return rows

    @property
    def title(self) -> str:
        points = listing(list(map(str, self.points)), "and")
        return f"{self.parametrization}: slopes of outputs on the {self.axis}, {points}"


def slope(points: Sequence[int], means: Sequence[float]) -> float:
    """Slope of the straight line through the logarithms, by least squares; NaN if a mean is 0 or not finite."""
    if not all(0 < mean < math.inf for mean in means):
        return math.nan
    return float(np.polyfit(np.log(points), np.log(means), 1)[0])


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def picture(lines: Sequence[Line]) -> Any:
    """One row of panels for every line, one panel for every module, one curve for every step."""
    size = 2.6 * len(MODULES), 2.7 * len(lines)
    figure, panels = pyplot.subplots(len(lines), len(MODULES), figsize=size, squeeze=False, layout="constrained")
    for row, line in zip(panels, lines, strict=True):
        for panel, module in zip(row, MODULES, strict=True):
            _panel(panel, line, module)
        row[0].set_ylabel(f"{line.parametrization}\nmean |output|")
    # Panels of a module have one scale for all parametrizations, so that slopes can be compared by eye.
    for column in range(len(MODULES)):
        for axis in {line.axis for line in lines}:
            alike = [row[column] for row, line in zip(panels, lines, strict=True) if line.axis == axis]
            low, high = (choose(panel.get_ylim()[end] for panel in alike) for end, choose in ((0, min), (1, max)))
            middle = math.sqrt(low * high)
            for panel in alike:
                panel.set_ylim(min(low, middle / 2), max(high, middle * 2))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _panel(panel: Any, line: Line, module: str) -> None:
    steps = line.means[module]
    for step, means in enumerate(steps):
        color = pyplot.get_cmap("viridis")(0.9 * step / max(1, len(steps) - 1))
        panel.plot(line.points, means, marker="o", markersize=3, color=color, label=f"step {step}")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(line.points, [str(point) for point in line.points])
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.set_title(f"{module}: {line.slopes(module)[-1]:+.2f}", fontsize=9)
    panel.set_xlabel(line.axis)
    panel.grid(alpha=0.3)
