"""`megalite show --memory`: predicted bytes of the ranks, beside the bytes that a dry run counts."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from megalite.base.errors import InputError, counted, listing, number_ranges
from megalite.base.exit_codes import ExitCode
from megalite.base.terminal import memory_unit, table
from megalite.commands.show.buffers import expert_buffers
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster
from megalite.cost.order_costs import costing_of
from megalite.distributed.start.local import LAUNCHER
from megalite.plan.activations import Activations
from megalite.plan.memory.fit import GIB, TENSOR_SHARE
from megalite.plan.memory.held import HOST_MEMORY, OUTSIDE_KINDS
from megalite.plan.memory.peak import KINDS, Memory
from megalite.plan.memory.rebalance import flatter_split
from megalite.plan.pipeline import as_full, placement
from megalite.plan.split import split_of, stage_costs, with_mtp
from megalite_launch.base.texts import memory_text

COMPONENTS = ("embedding", "attention", "mlp", "norms", "head", "adapters")  # in this order; others follow
HEADINGS = ("parameters", "gathered", "gradients", "states", "activations", "temporary")  # KINDS as headings
DEFAULT_GPU_GIB = 80  # where nothing else is known
TOTAL_TOLERANCE, KIND_TOLERANCE = 0.01, 0.05  # shares: up to the first, totals agree; above the second, kinds differ
MAX_PASSES = 4_000  # passes of layers, forward and backward, in a dry run: each takes a tenth of a second
TOKENS_PER_PASS = 1_400  # tokens whose loss takes as long as one pass
MAX_RANKS = 1 << 17  # in the world of a dry run: every thousand takes a second
MAX_LISTED = 8  # up to so many rows or numbers are all shown; longer lists are shortened
NOTE = (
    "Sums of live tensors at the peak of a training step, optimizer states included. Not counted: what lies outside of "
    "PyTorch's allocator{outside}, its rounding and fragmentation, and what kernels allocate inside."
)
CUDA_NOTE = "\nSizes are those of the CPU's kernels; CUDA's keep as much for backward, with fewer temporaries."
TRANSFER_NOTE = (
    "\nWith NCCL, buffers between pipeline stages are free again only when the transfers posted meanwhile have ended. "
    "Buffers that wait for that are not counted. Where memory runs short, PyTorch's allocator waits for them, which "
    "takes time: leave room for some micro-batches' activations between stages."
)
REPETITION_NOTE = (
    "\nIn fp32, attention on CUDA needs keys and values repeated for every query head; run.device=cuda counts that."
)


def fullest(memories: Sequence[Memory]) -> Memory:
    return max(memories, key=lambda memory: memory.total)


def measure(args: argparse.Namespace, config: Config, memory: Memory) -> dict[str, int]:
    """Bytes by kind that a dry run of the rank of `memory` counts. Raises InputError as `dry_run` does."""
    found: dict[str, int] = dry_run(args, config, memory, "--measure", "--memory alone")["bytes"]
    return found


def dry_run(args: argparse.Namespace, config: Config, memory: Memory, option: str, instead: str) -> dict[str, Any]:
    """Do a dry run of the rank of `memory`; return the fields of `megalite.dry_run.run.DryRun`, as JSON has them.

    args: `files`, `overrides` and `world_size`, of which `config` is made. option: the one that asks for the dry run,
    for messages, and what to use `instead` of it. The dry run has its own process, since this one imports no torch.
    Raises InputError for a dry run that would take too long, or fails.
    """
    _refuse_endless(config, memory, option, instead)
    pp = memory.pp
    with Console(stderr=True).status(f"Dry run of pipeline rank {pp} ..."):
        environment = {**os.environ, LAUNCHER: str(os.getpid())}  # it dies with this process
        command, none = dry_run_command(args, config, pp), subprocess.DEVNULL
        child = subprocess.run(command, env=environment, stdin=none, capture_output=True, text=True, check=False)
    if child.returncode != ExitCode.DONE:
        said = child.stderr.strip()
        if child.returncode != ExitCode.BAD_INPUT:
            said = said.rpartition("\n")[2]  # the last line of a traceback
        raise InputError(f"{option}: the dry run failed: {said or f'exit code {child.returncode}'}")
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def _refuse_endless(config: Config, memory: Memory, option: str, instead: str) -> None:
    owned = zip(placement(config), split_of(config), strict=True)
    layers, m = sum(count for rank, count in owned if rank == memory.pp), as_full(config, memory.micro_batches)
    ranks, passes = config.parallel.layout.world_size, layers * m
    if placement(config)[-1] == memory.pp and isinstance(config.batch.micro, int):
        tokens = m * config.batch.micro * config.model.sequence_length // config.parallel.cp
        if passes <= MAX_PASSES and tokens > (most := (MAX_PASSES - passes) * TOKENS_PER_PASS):
            raise InputError(
                f"{option}: the dry run of pipeline rank {memory.pp} would take the loss of {tokens:,} tokens, more "
                f"than the {most:,} that take minutes beside its layers; use fewer or shorter sequences, or "
                f"{instead}"
            )
    if passes > MAX_PASSES:
        raise InputError(
            f"{option}: the dry run of pipeline rank {memory.pp} would take {counted(layers, 'layer')} forward and "
            f"backward for up to {counted(m, 'micro-batch', 'micro-batches')}, {passes:,} passes, more than the "
            f"{MAX_PASSES:,} that take minutes; use fewer of either, or {instead}"
        )
    if ranks > MAX_RANKS:
        raise InputError(
            f"{option}: the dry run would make process groups of {ranks:,} ranks, more than the {MAX_RANKS:,} that "
            f"take minutes; use a smaller layout, or {instead}"
        )


def dry_run_command(args: argparse.Namespace, config: Config, pp: int) -> list[str]:
    """The dry run of `args`, with what options have decided in `config`."""
    world = [] if args.world_size is None else [f"--world-size={args.world_size}"]
    decided = {
        "run.device": config.run.device,
        "run.cluster": config.run.cluster,
        "batch.micro": config.batch.micro,
        "batch.memory": config.batch.memory,
    }
    keys = [f"{key}={json.dumps(value)}" for key, value in decided.items()]
    return [sys.executable, "-m", "megalite.dry_run", f"--pp={pp}", *world, *args.files, *args.overrides, *keys]


def verdict(config: Config, memories: Sequence[Memory], limit: float | None, cluster: Cluster | None = None) -> Text:
    """Say whether the fullest rank fits.

    limit: GiB of a device that tensors may fill; None: those of a GPU of `cluster`. Without either, a GPU of 80 GiB is
    assumed, or on CPUs no limit.
    """
    most = fullest(memories)
    where = f" on pipeline rank {most.pp}" if len(memories) > 1 else ""
    text = Text(f"{memory_text(most.total)} at the peak of a step{where}")
    if limit is not None:
        room, what = limit, f"the {memory_text(limit * GIB)} of batch.memory"
    elif cluster is not None:
        room = cluster.gpu.memory / GIB * TENSOR_SHARE
        what = f"the {memory_text(room * GIB)} that tensors may take of {cluster.gpu.name} ({cluster.name})"
    elif config.run.device == "cpu":
        return text.append(".")
    else:
        room = DEFAULT_GPU_GIB * TENSOR_SHARE
        what = (
            f"a GPU of {DEFAULT_GPU_GIB} GiB, of which tensors may take {room:g} GiB; "
            "no size is configured, so this one is assumed"
        )
    if most.total <= room * GIB:
        return text.append(f": fits {what}.", style="green")
    text.append(f": does not fit {what}.", style="bold red")
    return text.append(
        "\nTo need less: train.recompute, a smaller batch.micro, more of parallel.tp, pp or dp_shard "
        "(--world-size tells how many ranks there will be)."
    )


def _split_advice(config: Config, memories: Sequence[Memory]) -> str:
    """Advice on a split of the layers that lowers the peak, with the slowdown that it causes; "" if there is none."""
    found = flatter_split(config, memories, costing_of(config)) if len(memories) > 1 else None
    if found is None:
        return ""
    split, peak = found
    now, then = (max(stage_costs(config.model, layers)) for layers in (split_of(config), with_mtp(config.model, split)))
    slower = f"; its slowest stage takes {then / now - 1:.0%} longer" if then > now else ""
    shown = f"parallel.pipeline.split=[{', '.join(map(str, split))}]"
    before = memory_text(fullest(memories).total)
    return f"\n{shown} would lower the peak from {before} to {memory_text(peak)}{slower}."


def memory_sections(
    config: Config,
    memories: Sequence[Memory],
    limit: float | None,
    measured: dict[str, int] | None,
    cluster: Cluster | None = None,
) -> list[tuple[str, RenderableType]]:
    """Headings and contents: the fullest rank, the moment of its peak, all pipeline ranks if several, a verdict,
    conventions.

    measured: bytes by kind of a dry run. limit, cluster: see `verdict`.
    """
    most = fullest(memories)
    which = f" of pipeline rank {most.pp}, the fullest of {len(memories)}" if len(memories) > 1 else ""
    on_cuda = config.run.device != "cpu"
    note = NOTE.format(outside=" (on CUDA a context of 1 to 1.5 GiB, and NCCL's buffers)" if on_cuda else "")
    told = "" if measured is None else _simplified(config) + split_otherwise(most, measured)
    if config.run.device == "auto" and Activations(replace(config, run=replace(config.run, device="cuda"))).repeats:
        note += REPETITION_NOTE
    sections: list[tuple[str, RenderableType]] = [
        (f"Memory{which}: {config.parallel.layout}", _components(most, measured)),
        ("Moment of the peak", Text(f"{most.instant}")),
        ("Does it fit?", verdict(config, memories, limit, cluster).append(_split_advice(config, memories))),
        ("Conventions", Text(note + CUDA_NOTE * on_cuda + TRANSFER_NOTE * (on_cuda and config.parallel.pp > 1) + told)),
    ]
    if config.parallel.ep > 1:
        sections.insert(2, ("Tokens at their experts, of one layer and micro-batch", expert_buffers(config)))
    if len(memories) > 1:
        name, unit = memory_unit(most.total)
        sections.insert(2, (f"Pipeline ranks, {name}", _ranks(memories, unit)))
    return sections


def _simplified(config: Config) -> str:
    """A note on what the dry run of a configuration does differently from a run; "" if nothing."""
    told = {
        "every sample as one document": config.data.mask_documents,
        "keys and values that are not repeated for every query head": Activations(config).repeats,
        "layers that are not compiled": config.train.compile,
        "micro-batches that are no CUDA graphs": config.train.cuda_graph,
        "recompute chosen by estimated times": config.train.recompute == "budget",
    }
    apart = [what for what, matters in told.items() if matters]
    return f"\nMeasured with {listing(apart, 'and')}." if apart else ""


def split_otherwise(memory: Memory, measured: dict[str, int]) -> str:
    """A note if kinds differ but totals agree: of two nearly equal peaks, each side may have found another; else ""."""
    total, apart = sum(measured.get(kind, 0) for kind in KINDS), []
    for kind in KINDS:
        counted = measured.get(kind, 0)
        if abs(sum(memory.of(kind).values()) - counted) > max(KIND_TOLERANCE * counted, TOTAL_TOLERANCE * total):
            apart.append(kind)
    if not apart or abs(memory.total - total) > TOTAL_TOLERANCE * total:
        return ""
    return (
        f"\nThe total agrees, but not {listing(apart, 'and')}: most likely two moments of the step "
        "hold almost the same bytes; the prediction splits one of them, the dry run the other."
    )


def _components(memory: Memory, measured: dict[str, int] | None) -> Table:
    """A row for each kind, followed by rows for its components. Measured bytes are known for kinds only."""
    name, unit = memory_unit(memory.total)
    counts = ("measured", "difference") if measured is not None else ()
    shown = table("", name, "share", *counts, text=("",))

    def row(label: str, size: int, share: str, counted: int | None = None, style: str | None = None) -> None:
        cells = [] if counted is None else [f"{counted / unit:,.3f}", _difference(size, counted)]
        shown.add_row(label, f"{size / unit:,.3f}", share, *cells, style=style)

    for kind in (*KINDS, *OUTSIDE_KINDS):
        parts = memory.of(kind)
        counted = None if measured is None else measured.get(kind, 0)
        if not parts and not counted:
            continue
        if kind == HOST_MEMORY:
            shown.add_section()
        share = (lambda size: "") if kind in OUTSIDE_KINDS else (lambda size: f"{size / memory.total:.1%}")
        row(kind, sum(parts.values()), share(sum(parts.values())), counted, style="bold")
        for component, size in _in_order(parts) if len(parts) > 1 or kind in OUTSIDE_KINDS else ():
            row(f"  {component}", size, share(size))
        if kind == KINDS[-1]:
            total = None if measured is None else sum(size for of, size in measured.items() if of not in OUTSIDE_KINDS)
            row("total", memory.total, "100.0%", total, style="bold")
    return shown


def _ranks(memories: Sequence[Memory], unit: int) -> Table:
    shown = table("rank", "total", *HEADINGS)
    rows = []
    for memory in memories:
        sizes = (memory.total, *(sum(memory.of(kind).values()) for kind in KINDS))
        rows.append([f"{size / unit:,.2f}" for size in sizes])
    for ranks in alike(rows):
        shown.add_row(number_ranges(ranks), *rows[ranks[0]])
    return shown


def alike(rows: Sequence[object]) -> list[range]:
    """Indices of rows, as ranges: many rows are shortened, so that equal neighbours share a range."""
    found, start = [], 0
    for _, group in groupby(range(len(rows)), key=lambda row: rows[row] if len(rows) > MAX_LISTED else row):
        found.append(range(start, start := start + len(list(group))))
    return found


def _in_order(parts: dict[str, int]) -> list[tuple[str, int]]:
    """Components with their bytes, in the order of COMPONENTS, then the others."""
    order = (*(name for name in COMPONENTS if name in parts), *(name for name in parts if name not in COMPONENTS))
    return [(name, parts[name]) for name in order]


def _difference(predicted: int, counted: int) -> str:
    """The relative difference of the prediction from the counted bytes; "" if these are 0."""
    return f"{predicted / counted - 1:+.1%}" if counted else ""
