"""`megalite show`: layout, sizes, FLOPs and memory of a configuration, without torch, data or a launcher."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megalite.base.errors import InputError, counted, number_ranges
from megalite.base.exit_codes import ExitCode
from megalite.base.files import exists, write_new
from megalite.base.terminal import console, sections, table
from megalite.checkpoint.weights.argument import without_weights
from megalite.commands.show.expected import expected
from megalite.commands.show.memory import MAX_LISTED, alike, fullest, measure, memory_sections, verdict
from megalite.commands.show.parametrization import parametrization
from megalite.commands.show.schedule import MAX_UNASKED_ACTIONS, bubble_text, check_path, show_schedule
from megalite.config.attention_kernels import attention_heads, choose, kernel_lines, need_of
from megalite.config.layers import layer_kinds
from megalite.config.layout import AXES, Layout
from megalite.config.load import dump, dump_model, load
from megalite.config.model_schema import Model
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster, load_cluster
from megalite.cost.order_costs import costing_of
from megalite.cost.program import machine_of
from megalite.cost.state_files import files_text
from megalite.plan.batches import batch_sizes, samples_after
from megalite.plan.float8 import float8_text
from megalite.plan.memory.fit import TENSOR_SHARE, fitted
from megalite.plan.memory.peak import Memory, actions_of_peaks, memory_of_ranks
from megalite.plan.model.size import (
    Attention,
    Parameters,
    active_parameters,
    flops_per_token,
    layer_parameters,
    model_parameters,
    stage_parameters,
    trained_parameters,
)
from megalite.plan.overlap import overlap_text
from megalite.plan.pipeline import actions, check_schedule, micro_batches, placement
from megalite.plan.routing import routing_notes
from megalite.plan.split import layers_of, split_of, stage_costs

ATTENTION_FACTOR: dict[Attention, int] = {"causal": 6, "full": 12}
ASSUMED_GPU = machine_of("H100")  # where no cluster is named
PATIENCE = 100_000  # actions; a longer schedule is announced as taking a while


def run(args: argparse.Namespace) -> int:
    """Prints the resolved configuration, the layout, the sizes and the FLOPs per token; or the schedule, or memory.

    args: `files`, among which may be weights as `KIND:PATH`, and `overrides`; `write`, the file to save the model to or
    None; `world_size`, the number of ranks or None; `schedule`, the file to write the schedule
    to, "" to write none, or None to show something else; `memory` and `measure`; `cluster`, a name or a file or None.
    """
    if args.schedule:
        check_path(args.schedule)
    files, model = without_weights(args.files)
    asked = load(files, args.overrides, model)
    cluster, run = _cluster(args, asked), asked.run
    if cluster is not None:  # whatever this machine has
        named = asked.run.cluster if args.cluster is None else args.cluster
        asked = replace(asked, run=replace(run, cluster=named, device="cuda" if run.device == "auto" else run.device))
    config = check(asked, args.world_size)
    if args.write is not None:
        _write_model(args.write, asked.model)
    guessed = asked.parallel.dp_shard == "auto" and args.world_size is None
    offered = None if cluster is None else round(cluster.gpu.memory * TENSOR_SHARE)
    asking = config.batch.memory is not None or args.schedule is not None or args.memory
    if asking or cluster is not None:  # else left to the GPU of the run
        config = fitted(config, offered, costing=costing_of(config))
    if config.batch.micro != "auto":
        check_schedule(config)
    if args.schedule is not None:
        _tell_of_waiting(actions(config, micro_batches(config)), guessed)
        show_schedule(config, args.schedule)
        return ExitCode.DONE
    if args.memory:
        _tell_of_waiting(actions_of_peaks(config), guessed)
        memories = memory_of_ranks(config, costing_of(config))
        measured = measure(args, config, fullest(memories)) if args.measure else None
        sections(console(), memory_sections(config, memories, asked.batch.memory, measured, cluster))
        return ExitCode.DONE
    layout = config.parallel.layout
    parts: list[tuple[str, RenderableType]] = [
        ("Configuration", Text(dump(replace(config, run=run)).rstrip())),
        (f"Layout: {layout}{', with dp_shard: auto as 1 (see --world-size)' * guessed}", layout_table(layout)),
        ("Parameters", parameter_table(config.model)),
        *parametrization(config),
        ("Pipeline stages", _stage_table(config)),
        ("FLOPs per token of training", _flops_table(config.model)),
        ("Batch", Text(_batch(config))),
        ("Attention", Text(_attention(config, cluster))),
    ]
    if told := overlap_text(config, on_cpu=config.run.device == "cpu"):
        parts.append(("Tensor parallelism", Text(f"{told[0].upper()}{told[1:]}.")))
    if told := float8_text(config):
        parts.append(("Matrix products", Text(told)))
    if notes := routing_notes(config):
        parts.append(("Experts", Text("\n".join(notes.values()))))
    if config.batch.micro != "auto":
        predicted = None
        if actions_of_peaks(config) <= MAX_UNASKED_ACTIONS:
            predicted = memory_of_ranks(config, costing_of(config))
        if predicted is not None and (told := files_text(config, predicted, cluster)):
            parts.append(("Optimizer states in files", Text(told)))
        if cluster is None or asked.batch.memory is not None:
            parts.append(("Memory (more with --memory)", _memory(config, predicted, asked.batch.memory)))
        if cluster is not None or config.run.device != "cpu":
            parts.append(expected(config, predicted, cluster))
    sections(console(), parts)
    return ExitCode.DONE


def _cluster(args: argparse.Namespace, config: Config) -> Cluster | None:
    """The cluster that is asked about: by the option, or else by `run.cluster`."""
    if args.cluster is not None:
        return load_cluster(args.cluster)
    return None if config.run.cluster is None else load_cluster(config.run.cluster, "run.cluster = ")


def _write_model(path: str, model: Model) -> None:
    """Save the section `model` as a configuration file, which must not be there yet."""
    if not path.endswith((".yaml", ".yml")):
        raise InputError(f"--write {path}: must end in .yaml")
    if exists(path):
        raise InputError(f"--write {path}: there is such a file already; give another name")
    write_new(Path(path), dump_model(model))


def _tell_of_waiting(count: int, guessed: bool) -> None:
    """Says on stderr that a schedule of `count` actions takes a while, if it does.

    guessed: dp_shard is 1 because the number of ranks was not given, so one rank has all micro-batches.
    """
    if count > PATIENCE:
        why = "; parallel.dp_shard = auto is 1 without --world-size N, which may be why it is so long" * guessed
        print(f"megalite: a pipeline schedule of {count:,} actions takes a while{why}", file=sys.stderr)


def _memory(config: Config, memories: Sequence[Memory] | None, limit: float | None) -> Text:
    """The verdict on memory, or a note that the prediction, None, would take a while."""
    if memories is not None:
        return verdict(config, memories, limit)
    return Text(f"Not predicted here: along a schedule of {actions_of_peaks(config):,} actions that takes a while.")


def layout_table(layout: Layout) -> Table:
    """Size and stride of every axis, and the ranks that rank 0 forms a group with."""
    shown = table("axis", "size", "stride", "group of rank 0", text=("axis", "group of rank 0"))
    for i, axis in enumerate(AXES):
        size, stride = layout.shape[i], prod(layout.shape[i + 1 :])
        shown.add_row(axis, str(size), str(stride), _steps(size, stride))
    if layout.ep > 1:
        shown.add_row("ep", str(layout.ep), "1", _steps(layout.ep, 1))
    shown.add_row("ranks", str(layout.world_size), "", _span(range(layout.world_size)), style="bold")
    return shown


def parameter_table(model: Model) -> Table:
    """Parameters of every component of a model, of all layers and of the most frequent kind of layer."""
    ((usual, _),) = Counter(layer_kinds(model)).most_common(1)
    whole, layer = model_parameters(model), layer_parameters(model, usual)
    others = {"trained": trained_parameters(model), "active": active_parameters(model)}
    apart = {heading: some for heading, some in others.items() if some != whole}
    shown = table("component", "parameters", *apart, "in one layer", "share", text=("component",))
    for component in (*(field.name for field in fields(Parameters)), "total"):
        count, inside = getattr(whole, component), getattr(layer, component)
        name = "head (the embedding's weight)" if component == "head" and model.tie_embeddings else component
        counts = [f"{count:,}", *(f"{getattr(some, component):,}" for some in apart.values())]
        shown.add_row(name, *counts, f"{inside:,}" if inside else "", f"{count / whole.total:.1%}")
    return shown


def _stage_table(config: Config) -> Table:
    model, layout, split = config.model, config.parallel.layout, split_of(config)
    owners = placement(config)
    costs = stage_costs(model, split)
    shown = table("stage", "ranks", "layers", "also", "parameters", "relative cost", text=("ranks", "layers", "also"))
    sizes = stage_parameters(model, split)
    per_stage, layers, slowest, rows = layout.world_size // layout.pp, layers_of(split), max(costs), []
    for stage, count in enumerate(split):
        also = ["embedding"] * (stage == 0) + ["final norm, head"] * (stage == len(split) - 1)
        also += ["embedding"] * (stage == len(split) - 1 > 0 and model.mtp is not None)
        rows.append((count, ", ".join(also), f"{sizes[stage].total:,}", f"{costs[stage] / slowest:.2f}"))
    for stages in alike(rows):
        ranks = number_ranges(sorted({owners[stage] for stage in stages}), each=per_stage)
        count, *facts = rows[stages[0]]
        span = _span(range(layers[stages[0]].start, layers[stages[-1]].stop))
        each = f" ({count} each)" if len(stages) > 1 and count else ""
        shown.add_row(_span(stages), ranks, span + each, *facts)
    return shown


def _flops_table(model: Model) -> RenderableType:
    shown = table("attention", "FLOPs", text=("attention",))
    for attention in ATTENTION_FACTOR:
        shown.add_row(attention, f"{flops_per_token(model, attention):,}")
    factors = " or ".join(f"{factor} ({attention})" for attention, factor in ATTENTION_FACTOR.items())
    which = "weights of matrices" if model.experts is None else "active weights of matrices"
    times = "" if model.mtp is None else f" {1 + model.depth} times"
    weights = f"6 · {which}, with the head{times}, without the embedding"
    if trained_parameters(model) != model_parameters(model):
        weights += ", 4 · those that are not trained"
    formula = f"{weights}, + {factors} · layers · q · s"
    if any(kind.attention.heads.scores.window_in(model.sequence_length) for kind in layer_kinds(model)):
        formula += "; in layers with a window of n tokens, 12 · q · n (full) or 12 · q · (n − n² / 2s) (causal)"
    return Group(shown, Text(formula))


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
        lines.append(bubble_text(config))
    if config.train.cuda_graph and config.train.steps > 1:
        lines.append("From the second step on, the host launches each micro-batch by one call, as a CUDA graph.")
    steps, tokens = config.train.steps, samples_after(config, config.train.steps) * length
    lines.append(f"{counted(steps, 'step')} see{'s' * (steps == 1)} {tokens:,} tokens.")
    return "\n".join(lines)


def _attention(config: Config, cluster: Cluster | None) -> str:
    """The kernels of attention, with reasons, on a GPU with PyTorch alone, or on a CPU."""
    on_cpu = config.run.device == "cpu"
    gpu = None if on_cpu else machine_of(cluster.gpu.name) if cluster is not None else ASSUMED_GPU
    where = "a CPU" if on_cpu else cluster.gpu.name if cluster is not None else "an H100 or H200"
    asked = config.kernels_by_operation.attention
    try:
        choices = [choose(asked, need_of(config, heads), gpu) for heads in attention_heads(config)]
    except ValueError as error:
        return f"On {where}: kernels.attention = {asked}: {error}"
    return "\n".join(f"On {where}: {line}" for line in kernel_lines(config, choices))


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
    if len(numbers) <= MAX_LISTED:
        return [str(number) for number in numbers]
    return [*map(str, numbers[:4]), "...", str(numbers[-1])]
