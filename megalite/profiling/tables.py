"""The time of profiled steps in parts, beside the prediction, as a table."""

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megalite.base.terminal import table
from megalite.profiling.breakdown import DATA_WAIT, HOST_GAP, Breakdown
from megalite.profiling.expected import Expected
from megalite_launch.base.texts import seconds_text

WIDTH = 110  # columns of a table in a text
PASSES = ("fused", "copy", "pointwise")  # kinds that the planner predicts as one, passes over memory
LABELS = {
    "matmul": "matrix products",
    "attention": "attention",
    "fused": "  fused kernels",
    "pointwise": "  pointwise kernels",
    "copy": "  copies",
    "optimizer": "optimizer",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "exchanges of experts' rows",
    "pp": "pipeline messages, and waiting for stages",
    "dp": "data-parallel communication",
    "all": "communication of all ranks",
    "other": "communication of other groups",
    DATA_WAIT: "waiting for data",
    HOST_GAP: "waiting for the host",
}
PREDICTED = {  # part -> the parts of a prediction that it is compared with
    "matmul": ("products",),
    "attention": ("attention",),
    "optimizer": ("optimizer",),
    "tp": ("tensor",),
    "cp": ("context",),
    "ep": ("experts",),
    "pp": ("bubble",),
    "dp": ("data", "slowest"),
    HOST_GAP: ("host",),
}


def parts_table(found: Breakdown, steps: int, expected: Expected | None = None) -> Table:
    """A row for every part of a step, with all and hidden communication, and predicted seconds where there are some."""
    shown = table(
        "of a step", "measured", "share", "of all", "hidden", *(["predicted"] if expected else []), text=("of a step",)
    )

    def told(nanoseconds: int) -> str:
        return seconds_text(nanoseconds / 1e9 / steps) if nanoseconds else "0"

    def row(label: str, time: int, predicted: float | None, whole: str = "", hidden: str = "") -> None:
        share = f"{time / found.whole:.1%}" if found.whole else ""
        guess = [] if expected is None else ["" if predicted is None else seconds_text(predicted) if predicted else "0"]
        shown.add_row(Text(label), told(time), share, whole, hidden, *guess)

    def predicted(*names: str) -> float | None:
        return None if expected is None or not names else sum(expected.parts.get(name, 0.0) for name in names)

    for kind in ("matmul", "attention"):
        row(LABELS[kind], found.compute[kind], predicted(*PREDICTED[kind]))
    passes = sum(found.compute[kind] for kind in PASSES)
    row("passes over memory", passes, predicted("passes", "offload"))
    for kind in PASSES:
        if found.compute[kind]:
            row(LABELS[kind], found.compute[kind], None)
    row(LABELS["optimizer"], found.compute["optimizer"], predicted("optimizer"))
    for axis, each in found.axes.items():
        if each.total:
            names = PREDICTED.get(axis, ())
            row(LABELS[axis], each.exposed, predicted(*names), told(each.total), f"{each.hidden / each.total:.0%}")
    row(LABELS[DATA_WAIT], found.data_wait, None)
    row(LABELS[HOST_GAP], found.host_gap, predicted("host"))
    row("step", found.whole, None if expected is None else expected.seconds)
    return shown


def table_text(shown: Table) -> str:
    """The lines of a table."""
    on = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    on.print(shown)
    text = on.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())
