"""The methods of context parallelism on local processes: bytes sent (counted), memory (measured) and time.

Every rank runs attention, forward and backward, over its part of two sequences, with 8 query and 2 key-value heads.
Bytes are those that one rank sends, including those that it forwards for other ranks. Memory is the peak of live
tensors besides the inputs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.base.errors import InputError
from megalite.base.files import write_object
from megalite.config.layers import Scores
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Context, Parallel
from megalite.config.schema import Batch, Config, Train
from megalite.distributed import collectives
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.ranks import RankInfo
from megalite.dry_run.live_bytes import LiveBytes
from megalite.parallel.context import FULL_SCORES, attention
from megalite.parallel.fsdp import compute_dtype
from megalite.parallel.sequence import Method
from megalite.plan.parts.context import bytes_sent
from megalite_tools.bench.ranks import CPU, run_on_ranks
from megalite_tools.report_file import add_out
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-context"
METHODS: tuple[Method, ...] = get_args(Method)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark or, as one of its ranks, measures. Returns the exit code."""
    return run_on_ranks("megalite_tools.bench.context", _parser(), argv, _ranks, _measure)


def configuration(method: Method, cp: int, length: int, precision: str, head_width: int = 8) -> Config:
    """The configuration of two samples with 8 query heads and 2 key-value heads."""
    return Config(
        model=Model(heads=8, kv_heads=2, head_width=head_width, sequence_length=length),
        parallel=Parallel(dp_shard=1, cp=cp, context=Context(method)),
        batch=Batch(micro=2),
        train=Train(precision=precision),  # type: ignore[arg-type]
    )


def attend(config: Config, mesh: Mesh, kind: Scores = FULL_SCORES) -> Callable[[], Tensor]:
    """A function that runs attention over this rank's part of random sequences, which are made once, before it runs."""
    model, part = config.model, config.model.sequence_length // config.parallel.cp
    dtype = compute_dtype(config.train.dtype)
    q, k, v = (
        torch.randn(part, config.batch.micro_size, heads, model.head_size).to(dtype).requires_grad_()
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )
    run = attention(config.parallel.context.method, mesh.cp, model.sequence_length, CPU, kind=kind)
    return lambda: run(q, k, v)


@contextmanager
def counted_bytes(cp: int) -> Iterator[list[int]]:
    """Yields a list that receives the bytes of each transfer of this rank to others inside the context."""
    found: list[int] = []

    def counting(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.append(size(*args))
            return function(*args, **options)

        return call

    def sends(operations: Sequence[dist.P2POp]) -> int:
        return sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)

    gather, scatter = collectives.all_gather_single, collectives.reduce_scatter_single
    with (
        patch.object(dist, "batch_isend_irecv", counting(dist.batch_isend_irecv, sends)),
        patch.object(
            dist, "all_to_all_single", counting(dist.all_to_all_single, lambda _, x: x.nbytes * (cp - 1) // cp)
        ),
        patch.object(collectives, "all_gather_single", counting(gather, lambda _, x: x.nbytes * (cp - 1))),
        patch.object(collectives, "reduce_scatter_single", counting(scatter, lambda _, x: x.nbytes * (cp - 1) // cp)),
    ):
        yield found


def _ranks(options: argparse.Namespace) -> int:
    cp, length = options.cp, options.length
    if cp not in (2, 4, 8) or length < 2 * cp or length % (2 * cp) or options.rounds < 1:
        raise InputError("--cp must be 2, 4 or 8, --length a multiple of 2 · cp, and --rounds at least 1")
    return cp


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--cp", type=int, default=4, help="ranks (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, default=4096, metavar="TOKENS", help="length of the sequence (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of every method (default: %(default)s)")
    add_out(parser, "context_cpu.json")
    return parser


def _measure(rank_info: RankInfo, options: argparse.Namespace, header: dict[str, Any]) -> None:
    configs = {method: configuration(method, options.cp, options.length, "fp32", 64) for method in METHODS}
    mesh = Mesh.build(configs["ring"].parallel.layout, CPU)
    assert mesh is not None
    runs = {method: attend(config, mesh) for method, config in configs.items()}
    seconds: dict[Method, list[float]] = {method: [] for method in METHODS}
    for round_number in range(options.rounds + 1):
        for method in METHODS[:: 1 if round_number % 2 else -1]:
            taken = _time(runs[method], mesh)
            if round_number:  # the first warms up
                seconds[method].append(taken)
    rows = [
        {"method": method, **_bytes(configs[method], mesh), "seconds": seconds[method]}
        | {"time_ratio": statistics.median(a / b for a, b in zip(seconds[method], seconds["ring"], strict=True))}
        for method in METHODS
    ]
    if rank_info.rank == 0:
        report = {**header, "cp": options.cp, "sequence_length": options.length, "methods": rows}
        _show(report)
        write_object(Path(options.out), report)


def _time(run: Callable[[], Tensor], mesh: Mesh) -> float:
    """The seconds of forward and backward, until the last rank has finished."""
    dist.barrier(group=mesh.world)
    began = time.perf_counter()
    run().sum().backward()
    dist.barrier(group=mesh.world)
    return time.perf_counter() - began


def _bytes(config: Config, mesh: Mesh) -> dict[str, Any]:
    """The bytes that this rank sends, counted and predicted, and the peak of live bytes besides the inputs."""
    run = attend(config, mesh)
    with counted_bytes(config.parallel.cp) as found, LiveBytes() as live:
        y = run()
        y.backward(torch.ones_like(y))
    return {"sent": sum(found), "sent_predicted": sum(bytes_sent(config)), "peak": sum(live.peak().values())}


def _show(report: dict[str, Any]) -> None:
    terminal, rows = Terminal(), []
    tokens = f"2 × {report['sequence_length']:,} tokens"
    terminal.line(f"Attention over {tokens} on {report['cp']} ranks, fp32; of one rank:")
    for row in report["methods"]:
        sizes = [f"{row[key] / 2**20:.2f}" for key in ("sent", "sent_predicted", "peak")]
        times = f"{1e3 * statistics.median(row['seconds']):.1f}", f"{row['time_ratio']:.2f}"
        rows.append((row["method"], *sizes, *times))
    terminal.table(("method:", "sent MiB", "predicted MiB", "peak MiB", "ms", "time / ring"), rows)


if __name__ == "__main__":
    sys.exit(main())
