"""Peak memory of a training step with and without each method that saves memory: predicted, and counted.

Live bytes of all tensors are counted while a model of 100 million parameters takes a step on CPU, with two ranks for
methods of data parallelism. Counts are exact and the same in every run, so nothing is averaged.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import write_object
from megalite.commands.verify import random_batch
from megalite.config.load import files_and_overrides, load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.dry_run.run import count_step
from megalite.plan.memory.held import FILES, HOST_MEMORY
from megalite.plan.memory.peak import KINDS, rank_memory
from megalite.plan.model.size import model_parameters
from megalite.train.build import build, build_mesh
from megalite.train.recompute_costs import plan_for
from megalite_kernels import products
from megalite_tools.report_file import add_out, header
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-memory"
MODEL = (
    "model.layers=12",
    "model.width=640",
    "model.heads=10",
    "model.kv_heads=10",
    "model.ffn=1728",
    "model.vocab_size=32000",
    "model.sequence_length=512",
)
SAVERS = {  # by name: the settings that differ from the base
    "nothing saved": (),
    "recompute selective": ("train.recompute=selective",),
    "recompute full": ("train.recompute=full",),
    "full, every second layer": ("train.recompute=full", "train.recompute_every=2"),
    "offload activations": ("train.offload_activations=true",),
    "offload optimizer": ("optim.placement=host",),
    **{
        f"{mode}, 2 ranks": ("parallel.dp_shard=2", "batch.global=8", f"parallel.data.mode={mode}")
        for mode in ("ddp", "zero1", "zero2", "zero3")
    },
}
TOLERANCE = 0.05  # error of a prediction, relative to what is counted


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: FAILED if a prediction is off by more than the tolerance."""
    return exit_code(COMMAND, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the model of 100M parameters")
    add_out(parser, "memory_cpu.json")
    options = parser.parse_args(arguments)
    try:
        configs = _configs(options.overrides)
        progress = Console(stderr=True)
        rows = [_row(name, configs[name]) for name in track(configs, "Counting", console=progress, transient=True)]
        report = _report(configs, rows, shlex.join([COMMAND, *arguments]))
        _show(report)
        write_object(Path(options.out), report)
    except EOFError:
        print(f"{COMMAND}: error: a process died; what it said is above", file=sys.stderr)
        return ExitCode.FAILED
    if off := [row["name"] for row in rows if abs(row["difference"]) > TOLERANCE]:
        print(f"{COMMAND}: error: predictions off by more than {TOLERANCE:.0%}: {', '.join(off)}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.DONE


def _configs(given: Sequence[str]) -> dict[str, Config]:
    files, overrides = files_and_overrides(given)
    if files:
        raise InputError(f"{files[0]}: not of the form key=value")
    step = ("batch.micro=2", "batch.global=2", "run.device=cpu", "checkpoint.async=false")  # nothing is saved
    base = (*MODEL, "train.precision=fp32", *step, *overrides)
    return {name: check(load([], ["parallel.dp_shard=1", *base, *changes])) for name, changes in SAVERS.items()}


def _row(name: str, config: Config) -> dict[str, Any]:
    predicted, counted = rank_memory(config, 0), _count(config)
    on_host, _ = counted.pop(HOST_MEMORY, 0), counted.pop(FILES, 0)
    total = sum(counted.values())
    return {
        "name": name,
        "predicted_bytes": predicted.total,
        "counted_bytes": total,
        "difference": predicted.total / total - 1,
        "predicted_host_bytes": sum(predicted.of(HOST_MEMORY).values()),
        "counted_host_bytes": on_host,
        "counted_by_kind": {kind: counted.get(kind, 0) for kind in KINDS},
    }


def _count(config: Config) -> dict[str, int]:
    """The bytes that rank 0 holds at the peak of a step with real tensors, by kind. Every rank is a process."""
    context, size = get_context("spawn"), config.parallel.layout.world_size
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="megalite-") as meeting:
        given = (size, f"file://{meeting}/store", config)
        pipes = [theirs, *[None] * (size - 1)]
        ranks = [
            context.Process(target=_serve, args=(rank, *given, pipe), daemon=True) for rank, pipe in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            found: dict[str, int] = ours.recv()
        finally:
            for rank in ranks:
                rank.join()
    return found


def _serve(rank: int, size: int, meeting: str, config: Config, pipe: Connection | None) -> None:
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size)
    mesh = build_mesh(config, torch.device("cpu"))
    assert mesh is not None
    job = build(plan_for(config, mesh), mesh)
    with patch.object(products, "PREFERS_ONEDNN", False):  # the same on every processor: oneDNN's need copies
        found, _ = count_step(job, random_batch(job, 0))
    dist.barrier()
    dist.destroy_process_group()
    if pipe is not None:
        pipe.send(found)


def _report(configs: dict[str, Config], rows: list[dict[str, Any]], command: str) -> dict[str, Any]:
    config = next(iter(configs.values()))
    return header(command) | {
        "parameters": model_parameters(config.model).total,
        "precision": config.train.precision,
        "micro_batch_tokens": config.batch.micro_size * config.model.sequence_length,
        "tolerance": TOLERANCE,
        "rows": rows,
    }


def _show(report: dict[str, Any]) -> None:
    terminal, rows = Terminal(), []
    terminal.line(
        f"Peak of a training step, {report['parameters'] / 1e6:.0f}M parameters, {report['precision']}, "
        f"micro-batches of {report['micro_batch_tokens']:,} tokens; MiB"
    )
    for row in report["rows"]:
        sizes = (row["predicted_bytes"], row["counted_bytes"])
        more = (row["counted_host_bytes"], row["counted_by_kind"]["activations"])
        mib = [f"{size / 2**20:,.1f}" for size in (*sizes, *more)]
        rows.append((row["name"], *mib[:2], f"{row['difference']:+.2%}", *mib[2:]))
    terminal.table((":", "predicted", "counted", "difference", "host", "activations"), rows)


if __name__ == "__main__":
    sys.exit(main())
