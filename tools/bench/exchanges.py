"""The time of a step of experts whose exchanges travel over slow links, with and without compute beside them.

Two processes share out the experts of a small model, on one pipeline rank of dualpipev, so that nothing else waits. A
link is slowed by a clock: rows that were sent arrive once those before them have, and their own bytes have taken their
time, while the processor is free. Each process computes with one thread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from megalite.base.errors import InputError
from megalite.base.files import write_object
from megalite.commands.verify import random_batch
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import DataParallel, Parallel, Pipeline
from megalite.config.schema import Batch, Config, Train
from megalite.distributed.start.ranks import RankInfo
from megalite.plan.resolved import resolve
from megalite.train.build import Job, build, build_mesh
from megalite.train.step import train_step
from megalite_tools.bench.ranks import CPU, run_on_ranks
from megalite_tools.report_file import add_out
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-exchanges"
RANKS, MICRO_BATCHES = 2, 8
WAYS = (False, True)  # values of parallel.pipeline.overlap


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark or, as one of its ranks, measures. Returns the exit code."""
    return run_on_ranks("megalite_tools.bench.exchanges", _parser(), argv, _ranks, _measure)


def configuration(layers: int, overlap: bool) -> Config:
    """The configuration of a small model in every layer of which a token has two of eight experts."""
    experts = Experts(8, active=2, width=256, force_balance=True)
    return Config(
        model=Model(layers, 256, 4, 4, None, 512, 512, 256, experts=experts),
        parallel=Parallel(
            dp_shard=RANKS, ep=RANKS, pipeline=Pipeline("dualpipev", overlap=overlap), data=DataParallel("zero1")
        ),
        batch=Batch(1, RANKS * MICRO_BATCHES),
        train=Train(1, "fp32"),
    )


class SlowLink:
    """A link of `rate` bytes a second, over which one transfer goes after the other. inf: as fast as it is."""

    def __init__(self, rate: float) -> None:
        self.rate, self._free, self.bytes = rate, 0.0, 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Send rows of experts over this link meanwhile."""
        real = dist.all_to_all_single

        def send(output: Tensor, rows: Tensor, *args: Any, **options: Any) -> "_Arrival":
            size = rows.nbytes * (RANKS - 1) // RANKS
            self.bytes += size
            self._free = max(self._free, time.perf_counter()) + size / self.rate
            return _Arrival(real(output, rows, *args, **options), self._free)

        with patch.object(dist, "all_to_all_single", send):
            yield


class _Arrival:
    """A transfer that is over at the time `at`."""

    def __init__(self, work: dist.Work, at: float) -> None:
        self._work, self._at = work, at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


def _ranks(options: argparse.Namespace) -> int:
    if options.rounds < 1 or options.layers < 2 or any(rate <= 0 for rate in options.rates):
        raise InputError("--rounds must be at least 1, --layers 2, and --rates above 0")
    return RANKS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    help_text = "MB/s of slowed links (default: %(default)s)"
    parser.add_argument("--rates", type=float, nargs="+", default=[400.0, 200.0, 100.0, 50.0], help=help_text)
    parser.add_argument("--layers", type=int, default=8, help="layers with experts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of every way (default: %(default)s)")
    add_out(parser, "exchanges_cpu.json")
    return parser


def _measure(rank_info: RankInfo, options: argparse.Namespace, header: dict[str, Any]) -> None:
    configs = {overlap: configuration(options.layers, overlap) for overlap in WAYS}
    mesh = build_mesh(configs[True], CPU)
    assert mesh is not None
    jobs = {overlap: build(resolve(config), mesh) for overlap, config in configs.items()}
    rows = [_compare(jobs, SlowLink(rate * 1e6), options.rounds) for rate in (float("inf"), *options.rates)]
    if rank_info.rank == 0:
        report = {**header, "layers": options.layers, "links": rows}
        _show(report)
        write_object(Path(options.out), report)


def _compare(jobs: dict[bool, Job], link: SlowLink, rounds: int) -> dict[str, Any]:
    seconds: dict[bool, list[float]] = {overlap: [] for overlap in jobs}
    for number in range(rounds + 1):
        for overlap in WAYS[:: 1 if number % 2 else -1]:
            sent = link.bytes
            with link.used():
                taken = _time(jobs[overlap])
            if number:  # the first warms up
                seconds[overlap].append(taken)
    return {
        "megabytes_per_second": link.rate / 1e6 if link.rate < float("inf") else None,
        "sending": (link.bytes - sent) / link.rate,
        "one after the other": seconds[False],
        "in turns": seconds[True],
        "time_ratio": statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True)),
    }


def _time(job: Job) -> float:
    """The seconds of a step, until both ranks have taken it."""
    dist.barrier()
    began = time.perf_counter()
    train_step(job, random_batch(job, 0), 0)
    dist.barrier()
    return time.perf_counter() - began


def _show(report: dict[str, Any]) -> None:
    terminal, rows = Terminal(), []
    terminal.line(f"Steps of {MICRO_BATCHES} micro-batches, {report['layers']} layers with experts on {RANKS} ranks:")
    for row in report["links"]:
        rate = f"{row['megabytes_per_second']:.0f}" if row["megabytes_per_second"] else "as it is"
        times = (f"{1e3 * statistics.median(row[way]):.0f}" for way in ("one after the other", "in turns"))
        rows.append((rate, f"{1e3 * row['sending']:.0f}", *times, f"{row['time_ratio']:.2f}"))
    terminal.table(("MB/s:", "ms on the link", "ms, one after the other", "ms, in turns", "ratio"), rows)


if __name__ == "__main__":
    sys.exit(main())
