"""Layouts of several configurations beside each other."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from megalite.base.terminal import table
from megalite.commands.plan.request import Asked
from megalite.commands.plan.tables import fits_text, layout_text
from megalite.cost.layout_choice import choice_of
from megalite.cost.predict import Prediction
from megalite.cost.texts import PARTS, money, step_text
from megalite.cost.whole_run import run_of
from megalite.plan.memory.peak import KINDS, Memory
from megalite_launch.base.texts import memory_text, seconds_text

Pair = tuple[Prediction, Memory]


def comparison(asked: Sequence[Asked], names: Sequence[str], found: Sequence[Pair]) -> list[tuple[str, RenderableType]]:
    """Headings and tables: one column for each configuration, from the second on with its ratio to the first."""
    shown = table("", *names, text=("",))
    shown.add_row("layout", *(layout_text(choice_of(of.config)) for of, _ in found))
    shown.add_row("GPUs", *(f"{of.gpus:,}" for of, _ in found))
    shown.add_row("step", *(step_text(of) for of, _ in found))

    def row(name: str, value: Callable[[Pair], float], text: Callable[[float], str]) -> None:
        first = value(found[0])
        cells = [text(first)]
        for pair in found[1:]:
            times = f" ({value(pair) / first:.2f}×)" if first else ""
            cells.append(f"{text(value(pair))}{times}")
        shown.add_row(name, *cells)

    row("tokens/s/GPU", lambda pair: pair[0].tokens_per_second, "{:,.0f}".format)
    row("MFU", lambda pair: pair[0].mfu, "{:.1%}".format)
    for name, text in PARTS.items():
        if any(of.parts[name] > 1e-4 * of.seconds for of, _ in found):
            row(f"  {text}", lambda pair, name=name: pair[0].parts[name], seconds_text)  # type: ignore[misc]
    row("memory", lambda pair: pair[1].total, memory_text)
    for kind in KINDS:
        if any(memory.of(kind) for _, memory in found):
            row(f"  {kind}", lambda pair, kind=kind: sum(pair[1].of(kind).values()), memory_text)  # type: ignore[misc]
    shown.add_row("", *(fits_text(memory.total, one.limit) for one, (_, memory) in zip(asked, found, strict=True)))
    if asked[0].tokens:
        tokens = asked[0].tokens
        row("whole run", lambda pair: run_of(pair[0], tokens).seconds, seconds_text)
        row("cost", lambda pair: run_of(pair[0], tokens).cost, money)
    return [(f"On {asked[0].cluster.gpu.name} ({asked[0].cluster.name})", shown)]
