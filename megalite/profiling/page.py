"""The page about profiled steps: one file, which needs neither a network nor scripts."""

from collections.abc import Sequence

from megalite.base.html_tables import as_html
from megalite.profiling.measured_step import MeasuredStep
from megalite.profiling.memory import memory_chart
from megalite.profiling.ranks import RankProfile
from megalite.profiling.tables import parts_table
from megalite_launch.page.html import escape, paragraph, section
from megalite_launch.page.style import COLOURS, document

MAX_RANKS = 16  # ranks whose tables are on the page
PARTS_NOTE = (
    "Every moment counts once, so the parts add up to the step. Communication is hidden where something computes "
    "meanwhile, or an axis above it communicates; measured is what is exposed."
)


def page(run: str, ranks: Sequence[RankProfile], step: MeasuredStep | None) -> str:
    """The page of the profiled steps of a run: its ranks with their parts, the slowest of a pipeline first."""
    first = ranks[0].about
    title = f"{run}: profiled steps {first.first} to {first.last}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if step is not None:
        parts.append(section("Actions", f'<div class="timeline wide" tabindex="0">{step.svg()}</div>'))
    tables = [paragraph(PARTS_NOTE, "pale")]
    for each in ranks[:MAX_RANKS]:
        shown = as_html(parts_table(each.parts, each.about.steps, each.about.expected))
        tables += [f"<h3>rank {each.about.rank}</h3>", shown]
    if len(ranks) > MAX_RANKS:
        tables.append(paragraph(f"{len(ranks) - MAX_RANKS} more ranks are left out: those that compute least."))
    parts.append(section("Time of a step", *tables))
    if chart := memory_chart({each.about.rank: each.memory for each in ranks[: min(MAX_RANKS, len(COLOURS))]}):
        where = "the GPU" if ranks[0].on_gpu else "the host, counted from the begin of the recording"
        parts.append(section("Memory", paragraph(f"Tensors' memory on {where}.", "pale"), chart))
    return document(title, "\n".join(parts))
