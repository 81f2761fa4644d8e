"""Starting the ranks of a command that computes with a model: this process alone, a launcher's, or local ones."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megalite.base.errors import InputError, counted
from megalite.base.stop_signals import ended_at_once
from megalite.checkpoint.store.host_group import HostGroup
from megalite.config.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.host import on_cpus
from megalite.distributed.start.local import launch
from megalite.distributed.start.ranks import find_rank_info
from megalite.distributed.start.signals import end_when_stopped
from megalite.distributed.start.start import run_rank, start, start_alone

PATIENCE = 3600.0  # seconds that a rank waits for another, which may read a large checkpoint
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class ComputeSetup:
    """The mesh, host group and data type with which this process computes."""

    mesh: Mesh
    group: HostGroup
    dtype: torch.dtype

    @property
    def leads(self) -> bool:
        """Flag: this rank reads prompts and writes results."""
        return self.group.leads


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` reads."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="SOURCE",
        help="an adapter to add to the weights, a run or peft:FOLDER; several times: one after another, to compare",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (default: 1)")
    parser.add_argument("--ep", type=int, metavar="N", help="ranks that share out experts (default: those of --tp)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of weights and compute (default: fp32 on CPUs, bf16 on GPUs)"
    )


def layout_of(options: argparse.Namespace) -> Layout:
    """The layout that the options say: as many copies of the model as --ep needs, or as --dp says where that is one.

    Raises InputError.
    """
    dp, ep = getattr(options, "dp", None), options.tp if options.ep is None else options.ep
    if min(options.tp, options.pp, ep, 1 if dp is None else dp) < 1:
        raise InputError("--tp, --pp, --ep and --dp must be at least 1")
    if ep % options.tp:
        raise InputError(f"--ep {ep}: must be a multiple of --tp = {options.tp}, whose ranks have different experts")
    copies = ep // options.tp
    if dp is not None and dp % copies:
        raise InputError(f"--dp {dp}: must be a multiple of {copies}, the copies that share out experts by --ep {ep}")
    return Layout(pp=options.pp, dp_shard=dp or copies, tp=options.tp, ep=ep if copies > 1 else 1)


def run(module: str, arguments: Sequence[str], options: argparse.Namespace, work: Callable[[ComputeSetup], int]) -> int:
    """Do `work`, collectively, on as many ranks as the options say. Returns the exit code.

    Where no launcher has started this process and one rank is not enough, local ranks are started, as
    `python -m module arguments`. Raises InputError.
    """
    layout = layout_of(options)
    rank_info = find_rank_info()
    if rank_info is None:
        if layout.world_size > 1:
            with ended_at_once():
                shared = module if on_cpus(options.device) else None
                return launch(module, arguments, layout.world_size, shared=shared)
        return work(_place(layout, start_alone(options.device), options))
    if rank_info.world_size != layout.world_size:
        needed, found = counted(layout.world_size, "rank"), counted(rank_info.world_size, "rank")
        rule = f"{layout} takes {needed}, and the launcher has started {found}"
        raise InputError(f"{rule}; make --tp, --pp, --ep and --dp fit")
    end_when_stopped(rank_info)
    return run_rank(lambda: work(_place(layout, start(rank_info, options.device, PATIENCE), options)), rank_info)


def alone(options: argparse.Namespace) -> bool:
    """Return whether this process will be the only rank."""
    return find_rank_info() is None and layout_of(options).world_size == 1


def _place(layout: Layout, device: torch.device, options: argparse.Namespace) -> ComputeSetup:
    mesh = Mesh.build(layout, device, sharded=False)
    assert mesh is not None
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    return ComputeSetup(mesh, HostGroup(), dtype)
