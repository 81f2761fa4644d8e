"""The page of an experiment: one file, which needs neither a network nor scripts."""

from collections.abc import Callable, Sequence

from rich.table import Table

from megalite import __version__
from megalite.base.errors import counted, printable
from megalite.base.html_tables import as_html
from megalite.base.secrets import text_without_secrets
from megalite.base.terminal import table
from megalite.experiment.folder import STATES
from megalite.report.found import FoundLaws
from megalite.report.picture import Drawn
from megalite.scaling.show import amount_text, parts
from megalite_launch.base.texts import memory_text, seconds_text, share
from megalite_launch.page.html import escape, paragraph, section
from megalite_launch.page.style import document

STYLE = """<style>
.plot { display: block; width: 100%; height: auto; overflow: visible; }
.plot text { font-family: inherit; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 31rem), 1fr)); gap: 1.5rem 2rem; }
.plots figure { margin: 0; min-width: 0; }
.plots .broad { grid-column: 1 / -1; overflow-x: auto; }
.broad .plot { min-width: 42rem; }
.plots h3 { margin-bottom: .4rem; }
.mind { border-left: 4px solid var(--mark); padding: .2rem 0 .2rem 1.8rem; }
.mind li { margin: .25rem 0; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--pale); }
@media print {
  .plots { display: block; }
  .plots figure { break-inside: avoid; margin-bottom: 1rem; max-width: 17cm; }
  .plots .broad { max-width: none; overflow: visible; }
  .broad .plot { min-width: 0; }
  details > *:not(summary) { display: block; }
}
</style>"""
BROAD_CSS, BREADTH = ' class="broad"', 7.5  # inches from which a picture takes the whole width
MAX_ROWS = 1000  # runs in the table of the page; results.csv has all


def page(
    found: FoundLaws, drawn: Sequence[tuple[str, Sequence[Drawn]]], notes: Sequence[str], configuration: str
) -> str:
    """HTML. drawn: pictures under headings. notes: about files that could not be read."""
    name = printable(found.settings.name or found.folder.resolve().name)
    shown = [_head(found, name), _mind(found, notes)]
    shown += [_pictures(heading, some) for heading, some in drawn if some]
    shown += _tables(found)
    shown.append(section("All runs", _runs(found)))
    shown.append(section("Configuration", f"<pre>{escape(text_without_secrets(configuration))}</pre>"))
    foot = paragraph(f"Written by megalite {__version__}. The page loads nothing from a network.", "pale")
    return document(f"Experiment {name}", "\n".join([STYLE, *shown, f"<footer>{foot}</footer>"]))


def _head(found: FoundLaws, name: str) -> str:
    states = [sum(run.status == state for run in found.results.runs) for state in STATES]
    told = ", ".join(f"{count} {state}" for count, state in zip(states, STATES, strict=True) if count)
    lines = [f"Kind: {found.settings.kind}. {counted(len(found.results.runs), 'run')}: {told or 'none'}."]
    if found.fit and found.settings.kind == "ladder":
        policy = found.fit["settings"]
        lines.append(
            f"Fitted by {policy['method']} with delta {policy['delta']:g} and min_steps {policy['min_steps']:,}; "
            f"intervals are of {policy['interval']:.0%}, from {policy['bootstrap']:,} draws of runs."
        )
    return "\n".join([f"<header><h1>{escape(name)}</h1>", *map(paragraph, lines), "</header>"])


def _mind(found: FoundLaws, notes: Sequence[str]) -> str:
    told = [*([found.stale] if found.stale else []), *found.fit.get("caveats", []), *notes]
    if not found.fit and found.settings.kind != "systems":
        told.insert(0, "There is no fit.json: megalite-sweep fit makes one, with laws and intervals.")
    if not told:
        return ""
    items = "\n".join(f"<li>{escape(printable(each))}</li>" for each in told)
    return section("Mind", f'<ul class="mind">{items}</ul>')


def _pictures(heading: str, some: Sequence[Drawn]) -> str:
    figures = [
        f"<figure{BROAD_CSS if each.picture.size[0] > BREADTH else ''}><h3>{escape(each.picture.title)}</h3>{each.svg}"
        f"<figcaption>{escape(printable(each.picture.told))}</figcaption></figure>"
        for each in some
    ]
    return section(heading, '<div class="plots">', *figures, "</div>")


def _tables(found: FoundLaws) -> list[str]:
    shown = []
    for heading, body in parts(found.fit) if found.fit else []:
        if heading == "Mind":
            continue
        shown.append(section(heading, as_html(body) if isinstance(body, Table) else paragraph(str(body))))
    return shown


def _runs(found: FoundLaws) -> str:
    """A row for every run; columns that are empty throughout are left out."""
    results = found.results
    runs = results.runs[:MAX_ROWS]
    columns = {
        name: [_value(run.axes[name]) for run in runs]
        for name in results.axes
        if len({run.axes[name] for run in results.runs}) > 1
    }
    for name, column, text in COLUMNS:
        values = [found.size(run) if column == "N" else run.number(column or found.which) for run in runs]
        columns[name] = [text(value) if value == value else "" for value in values]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    made = table("run", *columns, "status", text=("run", "status"))
    for at, run in enumerate(runs):
        made.add_row(printable(run.slug), *(cells[at] for cells in columns.values()), run.status)
    told = ""
    if len(results.runs) > MAX_ROWS:
        told = paragraph(f"The first {MAX_ROWS:,} of {len(results.runs):,} runs; results.csv has all.", "pale")
    return as_html(made) + told


def _value(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else printable(value)


def _count(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS: Sequence[tuple[str, str, Callable[[float], str]]] = (  # "": the loss that is fitted
    ("seed", "seed", _count),
    ("N", "N", amount_text),
    ("D", "tokens", amount_text),
    ("steps", "steps", _count),
    ("batch", "batch_global", _count),
    ("GPUs", "gpus", _count),
    ("loss", "", "{:.4f}".format),
    ("tokens/s/GPU", "tokens_per_second_per_gpu", _count),
    ("MFU, causal", "mfu_causal", share),
    ("MFU, full", "mfu_full", share),
    ("memory", "peak_memory_bytes", memory_text),
    ("time", "seconds", seconds_text),
)
