"""The page about profiled steps: one file, which needs neither a network nor scripts."""

from collections.abc import Sequence

from megalite.base.html_tables import as_html
from megalite.profiling.actions import MeasuredStep
from megalite.profiling.breakdown import Breakdown
from megalite.profiling.expected import Expected
from megalite.profiling.memory import memory_chart
from megalite.profiling.tables import parts_table
from megalite.profiling.trace import Trace
from megalite_launch.page.html import escape, paragraph, section
from megalite_launch.page.style import COLOURS, document

MAX_RANKS = 16  # ranks whose tables are on the page
PARTS_NOTE = (
    "Every moment counts once, so the parts add up to the step. Communication is hidden where something computes "
    "meanwhile, or an axis above it communicates; measured is what is exposed."
)


def page(run: str, found: Sequence[tuple[Trace, Breakdown]], step: MeasuredStep | None) -> str:
    """The page of the profiled steps of a run: its ranks with their parts, the slowest of a pipeline first."""
    traces = [trace for trace, _ in found]
    first = traces[0].about
    title = f"{run}: profiled steps {first['first']} to {first['last']}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if step is not None:
        parts.append(section("Actions", f'<div class="timeline wide" tabindex="0">{step.svg()}</div>'))
    tables = [paragraph(PARTS_NOTE, "pale")]
    for trace, each in found[:MAX_RANKS]:
        shown = as_html(parts_table(each, trace.steps, Expected.read(trace.about)))
        tables += [f"<h3>rank {trace.rank}</h3>", shown]
    if len(found) > MAX_RANKS:
        tables.append(paragraph(f"{len(found) - MAX_RANKS} more ranks are left out: those that compute least."))
    parts.append(section("Time of a step", *tables))
    if chart := memory_chart(traces[: min(MAX_RANKS, len(COLOURS))]):
        where = "the GPU" if traces[0].on_gpu else "the host, counted from the begin of the recording"
        parts.append(section("Memory", paragraph(f"Tensors' memory on {where}.", "pale"), chart))
    return document(title, "\n".join(parts))
