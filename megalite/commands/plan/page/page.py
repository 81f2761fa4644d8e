"""The page of `megalite plan --html`: one file with pictures, which needs neither a network nor scripts."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from megalite import __version__
from megalite.base.errors import counted
from megalite.base.html_tables import as_html
from megalite.commands.plan.compare import comparison
from megalite.commands.plan.explain import PARTS
from megalite.commands.plan.page.bars import Bar, stacked
from megalite.commands.plan.page.scaling import front_chart, scaling_charts
from megalite.commands.plan.page.traffic_map import communication
from megalite.commands.plan.request import Asked
from megalite.commands.plan.tables import front, layout_text, ranking, routing_text
from megalite.config.schema import Config
from megalite.cost.flows import flows
from megalite.cost.layout_choice import choice_of
from megalite.cost.predict import Prediction, timeline
from megalite.cost.texts import step_text, turns_text
from megalite.layout_search.search import Found, Result, fullest_rank
from megalite.plan.memory.peak import KINDS, Memory
from megalite.plan.pipeline import micro_batches
from megalite.schedule.draw import draw_svg, size_text
from megalite_launch.base.texts import memory_text, seconds_text
from megalite_launch.page.html import Key, escape, paragraph, section, wide
from megalite_launch.page.style import COLOURS, document

MAX_BARS = 10  # layouts with bars
MAX_ACTIONS = 20_000  # actions of a timeline: with more, its picture has too many megabytes
TIME_KEYS = [Key(text, f"c{at}") for at, text in enumerate(PARTS.values())]
MEMORY_KEYS = [Key(kind, f"c{at}") for at, kind in enumerate(KINDS)]

assert len(PARTS) <= len(COLOURS)


def ranked_page(
    asked: Asked,
    given: Sequence[str],
    heading: str,
    found: Found,
    told: str,
    drawn: Prediction,
    *,
    row: int | None = None,
    searched: bool,
) -> str:
    """The page of a ranking, or of one layout. given: the words of the command. heading, told: of the terminal's table.

    drawn: the layout whose timeline and communication are shown, perhaps with an order of its own. row: which of
    `found` it is, if it was picked. searched: whether layouts were looked for.
    """
    shown = found.results[:MAX_BARS]
    names = [f"{at} · {layout_text(result.choice)}" for at, result in enumerate(shown, 1)]
    pairs = [(result.prediction, fullest_rank(result.prediction.config, asked.timer)) for result in shown]
    # The search walks through the ends of all pipelines but the first; the page's numbers are of all ranks.
    walked = [replace(result, memory=memory.total) for result, (_, memory) in zip(shown, pairs, strict=True)]
    found = replace(found, results=[*walked, *found.results[MAX_BARS:]])
    fastest = found.results[0].prediction if searched else None
    parts = [
        _head(asked, given, heading),
        section(
            "Layouts, the fastest first" if searched else "The layout",
            as_html(ranking(asked, found)),
            paragraph(told, "pale"),
        ),
        *_bars(names, pairs, asked.limit),
        *_closely(asked, drawn, "" if row is None else f" of row {row}"),
        scaling_charts(asked, found.results[(row or 1) - 1].prediction, fastest),
    ]
    return _page(heading, parts)


def front_page(
    asked: Asked, given: Sequence[str], heading: str, best: Sequence[tuple[int, Result]], chosen: Result, told: str
) -> str:
    """The page of a range of GPUs. chosen: the layout whose timeline and communication are drawn."""
    names = [
        f"{at} · {counted(gpus, 'GPU')} · {layout_text(result.choice)}" for at, (gpus, result) in enumerate(best, 1)
    ]
    pairs = [(result.prediction, fullest_rank(result.prediction.config, asked.timer)) for _, result in best]
    parts = [
        _head(asked, given, heading),
        section("The fastest layout for each number of GPUs", as_html(front(asked, best)), paragraph(told, "pale")),
        front_chart(asked, best),
        *_bars(names, pairs, asked.limit),
        *_closely(asked, chosen.prediction),
    ]
    return _page(heading, parts)


def compared_page(
    asked: Sequence[Asked], given: Sequence[str], files: Sequence[str], pairs: Sequence[tuple[Prediction, Memory]]
) -> str:
    """The page of several configurations, with one bar for each."""
    heading = f"{len(files)} configurations on {asked[0].cluster.gpu.name} ({asked[0].cluster.name})"
    names = [
        f"{at} · {file} · {layout_text(choice_of(of.config))}"
        for at, (file, (of, _)) in enumerate(zip(files, pairs, strict=True), 1)
    ]
    tables = [as_html(shown) for _, shown in comparison(asked, files, pairs) if isinstance(shown, Table)]
    limit = min(one.limit for one in asked)
    parts = [_head(asked[0], given, heading), section("Beside each other", *tables), *_bars(names, pairs, limit)]
    for one, file, (prediction, _) in zip(asked, files, pairs, strict=True):
        parts += _closely(one, prediction, f" of {file}")
    return _page(heading, parts)


def _page(heading: str, parts: Sequence[str]) -> str:
    foot = paragraph(f"Written by megalite {__version__}. The page loads nothing from a network.", "pale")
    return document(f"megalite plan: {heading}", "\n".join([*parts, f"<footer>{foot}</footer>"]))


def _head(asked: Asked, given: Sequence[str], heading: str) -> str:
    cluster, spread = asked.cluster, asked.timer.constants.spread
    model = asked.config.model
    levels = [f"{counted(level.gpus, 'GPU')} with {level.link.bandwidth / 1e9:,.0f} GB/s" for level in cluster.levels]
    lines = [
        f"Model: {counted(model.layers, 'layer')} of width {model.width:,}, {counted(model.heads, 'head')} with "
        f"{model.kv_heads} of keys and values, MLPs of {model.ffn:,}, a vocabulary of {model.vocab_size:,}.",
        f"Batch: {counted(asked.config.batch.global_, 'sequence')} of {model.sequence_length:,} tokens a step"
        + (f"; the whole run has {asked.tokens:,.0f} tokens." if asked.tokens else "."),
        *([routing_text(asked)] if model.experts else []),
        f"Cluster {cluster.name}: {cluster.gpu.name} with {memory_text(cluster.gpu.memory)}; nodes of "
        f"{'; islands of '.join(reversed(levels))}; between nodes "
        f"{cluster.network.bandwidth / 1e9:,.0f} GB/s for each GPU.",
        f"Tensors may take {memory_text(asked.limit)} of a GPU. All times are predictions, with intervals of "
        f"±{spread:.0%}.",
    ]
    command = escape(shlex.join(["megalite", *given]))
    return "\n".join(
        [
            f"<header><h1>{escape(heading)}</h1>",
            f"<pre>{command}</pre>",
            *map(paragraph, lines),
            "</header>",
        ]
    )


def _bars(names: Sequence[str], pairs: Sequence[tuple[Prediction, Memory]], limit: float) -> list[str]:
    """Step times and memory, a bar for each layout."""
    times = [
        Bar(name, step_text(of), {PARTS[part]: of.parts[part] for part in PARTS}, (of.low, of.high))
        for name, (of, _) in zip(names, pairs, strict=True)
    ]
    held = [
        Bar(name, memory_text(memory.total), {kind: float(sum(memory.of(kind).values())) for kind in KINDS})
        for name, (_, memory) in zip(names, pairs, strict=True)
    ]
    return [
        section(
            "Where a step's time goes",
            paragraph("On the busiest pipeline rank. The thin line is the interval of the whole step.", "pale"),
            stacked(times, TIME_KEYS, seconds_text),
        ),
        section(
            "Where memory goes",
            paragraph("On the fullest pipeline rank at its peak.", "pale"),
            stacked(held, MEMORY_KEYS, memory_text, ("limit", limit)),
        ),
    ]


def _closely(asked: Asked, prediction: Prediction, of: str = "") -> list[str]:
    """The timeline and the communication of one layout."""
    name = f"{layout_text(choice_of(prediction.config))}, on {counted(prediction.gpus, 'GPU')}"
    return [
        section(f"Pipeline timeline{of}", paragraph(name, "pale"), *_timeline(asked, prediction)),
        section(
            f"Who talks to whom{of}",
            paragraph(name, "pale"),
            _map(asked, prediction),
        ),
    ]


def _timeline(asked: Asked, prediction: Prediction) -> list[str]:
    config = prediction.config
    drawn, m = timeline(prediction, asked.timer), micro_batches(config)
    few = drawn.table.micro_batches
    told = f"A step has {counted(m, 'micro-batch', 'micro-batches')}"
    if few < m:
        told += f"; the picture is of a step with {few}, since each more adds as much again"
    told += ". Times are in seconds. Point at a box to read its own."
    actions = sum(len(spans) for spans in drawn.spans)
    if actions > MAX_ACTIONS:
        return [paragraph(f"The timeline has {actions:,} actions, too many for a page. {_elsewhere(config)}")]
    turns = turns_text(prediction)
    return [
        paragraph(told, "pale"),
        *([paragraph(turns, "pale")] if turns else []),
        f'<div class="timeline">{wide(draw_svg(drawn.table, drawn, size_text(drawn.table)))}</div>',
    ]


def _elsewhere(config: Config) -> str:
    return f"Its schedule is {config.parallel.pipeline.schedule}; megalite show CONFIG --schedule FILE.svg draws it."


def _map(asked: Asked, prediction: Prediction) -> str:
    found = flows(prediction, asked.timer)
    if not found:
        return paragraph("There is one GPU, which talks to nobody.")
    told = (
        "Bytes are those that a GPU of the busiest pipeline rank sends in a step. Alone: the seconds that this takes "
        "with the link's bandwidth and latency. In the step: what the prediction counts of it, as compute hides the "
        "rest. The pictures show the GPUs that talk to GPU 0; all others have such groups of their own. Broken lines "
        "go from node to node."
    )
    return paragraph(told, "pale") + communication(found, prediction)
