"""Count what a data-parallel rank sends in a training step with AdamW, and with Muon.

Runs a step on rank 0 by the code that trains, without data and without the other ranks, and adds up what its
collectives send. A ring is assumed: of n ranks, each sends (n − 1)/n of all that is gathered or reduced, and twice that
where every rank is to have the whole sum. Muon's exchanges are counted as they are sent. They differ between owners, so
the plan gives those of the other ranks, after its figure for rank 0 is compared with the count.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.config.load import files_and_overrides, load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.data.loader import Micros
from megalite.dry_run.run import dry_job
from megalite.plan.muon import MuonPlan, stage_matrices, working_bytes
from megalite.plan.resolved import resolve
from megalite.train.step import train_step

COMMAND = "python -m megalite_tools.experiment.muon_traffic"
Mode = Literal["ddp", "zero1", "zero2", "zero3"]

MODES: tuple[Mode, ...] = ("zero1", "zero2", "zero3", "ddp")


class Sent(TorchDispatchMode):
    """Counts what collectives send to other ranks: bytes by kind, and for Muon's exchanges elements."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()
        self.exchanged = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func._schema.name:
            case "c10d::_allgather_base_":  # output, input
                self.bytes["gathered"] += args[0].nbytes - args[1].nbytes
            case "c10d::_reduce_scatter_base_":
                self.bytes["reduced"] += args[1].nbytes - args[0].nbytes
            case "c10d::allreduce_":
                ranks = dist.ProcessGroup.unbox(args[1]).size()
                self.bytes["reduced"] += sum(2 * (ranks - 1) * tensor.nbytes // ranks for tensor in args[0])
            case "c10d::alltoall_base_":  # output, input, group, and elements from and to each rank
                sizes = args[4]
                self.exchanged += sum(sizes) - sizes[dist.ProcessGroup.unbox(args[2]).rank()]
            case name if name.startswith("c10d::"):
                raise NotImplementedError(name)
        return func(*args, **kwargs or {})


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="FILE or KEY=VALUE", help="a configuration without pp, tp and cp")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:3], help="of data parallelism")
    parser.add_argument(
        "--micros", nargs="+", type=int, default=[1, 4, 16], metavar="N", help="micro-batches of a step"
    )
    return exit_code(COMMAND, lambda: _report(parser.parse_args(argv)))


def _report(options: argparse.Namespace) -> None:
    config = load(*files_and_overrides(options.inputs))
    print("| mode | micro-batches | AdamW, MB | Muon, MB: mean rank | busiest | Muon / AdamW: mean rank | busiest |")
    print("|---|---|---|---|---|---|---|")
    for each in _cases(config, options.modes, options.micros):
        adamw, mean, most = traffic(each)
        m = each.batch.global_ // (each.batch.micro_size * each.parallel.layout.dp)
        numbers = " | ".join(f"{size / 1e6:,.1f}" for size in (adamw, mean, most))
        print(f"| {each.parallel.data_mode} | {m} | {numbers} | {mean / adamw:.3f} | {most / adamw:.3f} |", flush=True)


def _cases(config: Config, modes: Sequence[Mode], micros: Sequence[int]) -> Iterator[Config]:
    """The configuration in each mode with each number of micro-batches. Raises InputError for what is automatic."""
    shards, size = config.parallel.dp_shard, config.batch.micro
    if not isinstance(shards, int) or not isinstance(size, int):
        raise InputError("parallel.dp_shard and batch.micro have to be numbers here; give them after the file")
    for mode in modes:
        for m in micros:
            data = replace(config.parallel.data, mode=mode)
            batch = replace(config.batch, global_=m * size * config.parallel.dp_replicate * shards)
            yield check(replace(config, parallel=replace(config.parallel, data=data), batch=batch))


def traffic(config: Config) -> tuple[float, float, float]:
    """Bytes that a rank sends in a step with AdamW, and with Muon on the mean of ranks and on the one that sends most.

    Raises InputError where more than parameters and gradients is sent: with other axes than those of data.
    """
    layout = config.parallel.layout
    if layout.pp * layout.tp * layout.cp > 1:
        raise InputError(f"{layout}: what is sent is counted with pp, tp and cp of 1")
    adamw, muon = (_counted(replace(config, optim=replace(config.optim, name=name))) for name in ("adamw", "muon"))
    shards = layout.dp_shard if config.parallel.data.sharded else 1
    matrices = stage_matrices(config.model, range(config.model.layers), layout.dp // shards, shards, 1)
    exchanged = MuonPlan(matrices, 1).sent()
    if (muon.exchanged, muon.bytes) != (exchanged[0], adamw.bytes):
        raise AssertionError(
            f"counted {muon.exchanged} elements and {muon.bytes}, not {exchanged[0]} and {adamw.bytes}"
        )
    itemsize, base = working_bytes(config), adamw.bytes.total()
    return base, base + itemsize * sum(exchanged) / len(exchanged), base + itemsize * max(exchanged)


def _counted(config: Config) -> Sent:
    config = replace(config, train=replace(config.train, compile=False), kernels="torch")
    layout, size = config.parallel.layout, config.batch.micro_size
    shape = (config.batch.global_ // (size * layout.dp), size, config.model.sequence_length + 1)
    with dry_job(resolve(config, costing=costing_of(config)), 0) as (job, _):
        batch = Micros.cut_at(torch.zeros(*shape, dtype=torch.int64), None)
        with Sent() as sent:
            train_step(job, batch, 0)
    return sent


if __name__ == "__main__":
    sys.exit(main())
