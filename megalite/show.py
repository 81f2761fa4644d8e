"""`megalite show`: what a configuration amounts to, without torch, data or a launcher."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from math import prod
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from megalite.config.errors import InputError, counted, number_ranges
from megalite.config.files import exists, write_whole
from megalite.config.layout import AXES, Layout
from megalite.config.load import dump, load
from megalite.config.schema import Config, Model
from megalite.config.validate import check
from megalite.output import UNBOUNDED
from megalite.plan.batches import batch_sizes, samples_after
from megalite.plan.fit import fit_micro
from megalite.plan.memory import memory_of_ranks
from megalite.plan.pipeline import micro_batches, table_of
from megalite.plan.size import (
    Attention,
    Parameters,
    flops_per_token,
    layer_parameters,
    model_parameters,
    stage_parameters,
)
from megalite.plan.split import layers_of, split_of, stage_costs
from megalite.schedule.draw import draw_svg, draw_text, title
from megalite.schedule.file import SUFFIXES, write
from megalite.schedule.simulate import simulate
from megalite.show_memory import FEW, alike, fullest, measure, memory_sections, verdict

ATTENTION_FACTOR: dict[Attention, int] = {"causal": 6, "full": 12}


def run(args: argparse.Namespace) -> int:
    """Prints the resolved configuration, the layout, the sizes and the FLOPs per token; or the schedule, or memory.

    Takes `args.files`, `args.overrides`, `args.world_size`, the number of ranks or None, `args.schedule`: the file to
    write the schedule to, "" for none, or None to show something else, `args.memory` and `args.measure`.
    """
    asked = load(args.files, args.overrides)
    config = check(asked, args.world_size)
    if config.batch.memory is not None or args.schedule is not None or args.memory:  # else left to the GPU of the run
        config = fit_micro(config)
    if args.schedule is not None:
        return _show_schedule(config, args.schedule)
    if args.memory:
        memories = memory_of_ranks(config)
        measured = measure(args, fullest(memories).pp) if args.measure else None
        _print(_console(), memory_sections(config, memories, asked.batch.memory, measured))
        return 0
    layout = config.parallel.layout
    unlaunched = asked.parallel.dp_shard == "auto" and args.world_size is None
    sections: list[tuple[str, RenderableType]] = [
        ("Configuration", Text(dump(config))),
        (f"Layout: {layout}{', with dp_shard: auto as 1 (see --world-size)' * unlaunched}", _layout_table(layout)),
        ("Parameters", _parameter_table(config.model)),
        ("Pipeline stages", _stage_table(config)),
        ("FLOPs per token of training", _flops_table(config.model)),
        ("Batch", Text(_batch(config))),
    ]
    if config.batch.micro != "auto":
        memories = memory_of_ranks(config)
        sections.append(("Memory (more with --memory)", verdict(config, memories, asked.batch.memory)))
    _print(_console(), sections)
    return 0


def _show_schedule(config: Config, path: str) -> int:
    """Prints the timeline of the pipeline schedule, and writes it to `path` unless that is empty."""
    if path and not path.endswith((".svg", *SUFFIXES)):
        rule = "must end in .svg for a picture or .yaml for a schedule file; CONFIG goes before --schedule"
        raise InputError(f"--schedule {path}: {rule}")
    if path.endswith(SUFFIXES) and exists(path):  # it may be a CONFIG that the option has taken for its file
        raise InputError(f"--schedule {path}: there is such a file already; CONFIG goes before --schedule")
    table = table_of(config)
    timeline = simulate(table)
    console = _console()
    _print(console, [(title(table, timeline), draw_text(table, timeline, console.width))])
    if path:
        write_whole(Path(path), draw_svg(table, timeline) if path.endswith(".svg") else write(table))
    return 0


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else UNBOUNDED)


def _print(console: Console, sections: list[tuple[str, RenderableType]]) -> None:
    with console.capture() as captured:
        for heading, body in sections:
            console.print(Text(heading, style="bold"))
            console.print(body)
    # Written by ourselves: rich would end the process where the reader has left.
    sys.stdout.write(captured.get())


def _table(*columns: str, text: tuple[str, ...]) -> Table:
    """An empty table; the columns named in `text` are aligned left, the others are numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in text else "right")
    return table


def _layout_table(layout: Layout) -> Table:
    table = _table("axis", "size", "stride", "group of rank 0", text=("axis", "group of rank 0"))
    for i, axis in enumerate(AXES):
        size, stride = layout.shape[i], prod(layout.shape[i + 1 :])
        table.add_row(axis, str(size), str(stride), _steps(size, stride))
    table.add_row("ranks", str(layout.world_size), "", _span(range(layout.world_size)), style="bold")
    return table


def _parameter_table(model: Model) -> Table:
    whole, layer = model_parameters(model), layer_parameters(model)
    table = _table("component", "parameters", "in one layer", "share", text=("component",))
    for component in (*(field.name for field in fields(Parameters)), "total"):
        count, inside = getattr(whole, component), getattr(layer, component)
        name = "head (the embedding's weight)" if component == "head" and model.tie_embeddings else component
        table.add_row(name, f"{count:,}", f"{inside:,}" if inside else "", f"{count / whole.total:.1%}")
    return table


def _stage_table(config: Config) -> Table:
    model, layout, split = config.model, config.parallel.layout, split_of(config)
    m = 1 if config.batch.micro == "auto" else micro_batches(config)  # stages are placed the same for any number
    placement = table_of(config, m).placement
    costs = stage_costs(model, split)
    table = _table("stage", "ranks", "layers", "also", "parameters", "relative cost", text=("ranks", "layers", "also"))
    sizes = stage_parameters(model, split)
    per_stage, layers, rows = layout.world_size // layout.pp, layers_of(split), []
    for stage, count in enumerate(split):
        also = ["embedding"] * (stage == 0) + ["final norm, head"] * (stage == len(split) - 1)
        rows.append((count, ", ".join(also), f"{sizes[stage].total:,}", f"{costs[stage] / max(costs):.2f}"))
    for stages in alike(rows):
        ranks = number_ranges(sorted({placement[stage] for stage in stages}), each=per_stage)
        count, *facts = rows[stages[0]]
        span = _span(range(layers[stages[0]].start, layers[stages[-1]].stop))
        each = f" ({count} each)" if len(stages) > 1 and count else ""
        table.add_row(_span(stages), ranks, span + each, *facts)
    return table


def _flops_table(model: Model) -> Table:
    table = _table("attention", "FLOPs", "convention", text=("attention", "convention"))
    for attention, factor in ATTENTION_FACTOR.items():
        convention = f"6 · weights of matrices, with the head, without the embedding + {factor} · layers · q · s"
        table.add_row(attention, f"{flops_per_token(model, attention):,}", convention)
    return table


def _batch(config: Config) -> str:
    batch, length, dp = config.batch, config.model.sequence_length, config.parallel.layout.dp
    if batch.micro == "auto":
        cut = "micro-batches as large as fit the GPU"
    else:
        cut = f"{counted(micro_batches(config), 'micro-batch', 'micro-batches')} of {batch.micro}"
    lines = [
        f"{counted(batch.global_, 'sequence')} of {length:,} tokens make {batch.global_ * length:,} tokens a step, as "
        f"{cut} on {counted(dp, 'data-parallel rank')}."
    ]
    if batch.rampup is not None:
        sizes = " → ".join(_abridged(batch_sizes(config)))
        lines.append(f"The batch grows over the first {batch.rampup.tokens:,} tokens: {sizes} sequences.")
    if batch.curriculum is not None:
        start, tokens = batch.curriculum.start, batch.curriculum.tokens
        lines.append(f"Sequences grow over the first {tokens:,} tokens, from {start:,} to {length:,} tokens.")
    if config.parallel.pp > 1 and batch.micro != "auto":
        bubble, schedule = float(simulate(table_of(config)).bubble), config.parallel.pipeline.schedule
        lines.append(f"The bubble of {schedule} is {bubble:.1%} of a step where all stages take equally long.")
    steps, tokens = config.train.steps, samples_after(config, config.train.steps) * length
    lines.append(f"{counted(steps, 'step')} see{'s' * (steps == 1)} {tokens:,} tokens.")
    return "\n".join(lines)


def _span(numbers: range) -> str:
    """A contiguous range: `4-7`."""
    if len(numbers) < 2:
        return str(numbers[0]) if numbers else "none"
    return f"{numbers[0]}-{numbers[-1]}"


def _steps(size: int, stride: int) -> str:
    """The ranks of an axis from rank 0: `0, 8, 16, 24`."""
    return ", ".join(_abridged(range(0, size * stride, stride)))


def _abridged(numbers: Sequence[int]) -> list[str]:
    """The numbers as text, the middle of a long list left out."""
    if len(numbers) <= FEW:
        return [str(number) for number in numbers]
    return [*map(str, numbers[:4]), "...", str(numbers[-1])]
