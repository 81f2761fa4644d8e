"""Saving and loading a checkpoint on local processes, beside `torch.distributed.checkpoint` and `torch.save`.

Every rank holds its shard of a model's weights and moments in fp32. All write it to the disk (flushed), and read it
back; megalite also hashes every file when it writes and when it reads. An asynchronous save stops training for a time,
its stall, and slows training down while it writes. The lost time is how much longer a fixed amount of work takes.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor

from megalite.base.errors import InputError
from megalite.base.files import is_folder, write_object
from megalite.checkpoint.run.load import Restorer
from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.save_events import Failed
from megalite.checkpoint.store.state import State
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Checkpoint, Config, Train
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.ranks import RankInfo
from megalite.optim.build import build_optimizer
from megalite.plan.resolved import resolve
from megalite.train.build import build_stage
from megalite_tools.bench.local_tier import Rhythm, measure_standstill, measure_tiers
from megalite_tools.bench.ranks import CPU, run_on_ranks
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-checkpoint"
FOLDER_VARIABLE = "MEGALITE_BENCH_FOLDER"  # environment of ranks: new folders on both disks
LOCAL_FOLDER_VARIABLE = "MEGALITE_BENCH_LOCAL"
KEPT_STAGER = not torch.__version__.startswith("2.11.")  # whether a stager of DCP can take DTensors more than once
PRODUCT_COUNT = 40  # products of squares, as wide as the model, that stand for training during an asynchronous save
Timing = dict[str, list[float]]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark or, as one of its ranks, measures. Returns the exit code."""
    return run_on_ranks("megalite_tools.bench.checkpoint", _parser(), argv, _ranks, _measure, around=_folders)


@contextmanager
def _folders(options: argparse.Namespace) -> Iterator[None]:
    """New folders on both disks, which the ranks find in their environment."""
    with (
        TemporaryDirectory(prefix=f"{COMMAND}-", dir=options.folder) as own,
        TemporaryDirectory(prefix=f"{COMMAND}-", dir=options.local) as local,
    ):
        os.environ[FOLDER_VARIABLE], os.environ[LOCAL_FOLDER_VARIABLE] = os.path.abspath(own), os.path.abspath(local)
        yield


def _ranks(options: argparse.Namespace) -> int:
    counts = (options.ranks, options.rounds, options.layers, options.width, options.saves, options.every)
    if min(counts) < 1 or options.width % 64:
        raise InputError("--ranks, --rounds, --layers, --saves, --every must be at least 1, --width a multiple of 64")
    if not 0 < options.pause < 3600:
        raise InputError(f"--pause {options.pause}: must be seconds, above 0")
    for option in ("folder", "local"):
        if not is_folder(path := getattr(options, option)):
            raise InputError(f"--{option} {path}: no such folder")
    return int(options.ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: %(default)s)")
    parser.add_argument(
        "--width",
        type=int,
        default=1024,
        help="width of the model, a multiple of 64 (default: %(default)s, 12.6M parameters a layer)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of every measurement (default: %(default)s)")
    parser.add_argument(
        "--folder", default=".", help="a folder on the disk to be measured (default: the working directory)"
    )
    parser.add_argument(
        "--local", default="/dev/shm", help="a folder in memory, for local checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="local checkpoints beside shared ones alone, and how long training stands still for both",
    )
    for name, default, text in (
        ("pause", 1.0, "with --tiers: seconds of work between two saves"),
        ("saves", 30, "with --tiers: how many saves"),
        ("every", 10, "with --tiers: of how many local saves one is copied to --folder"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--out",
        metavar="JSON",
        help="result to write (default: checkpoint_cpu.json in docs/benchmarks; with --tiers local_tier_cpu.json)",
    )
    return parser


class Bench:
    """The state of one rank, and the ways to save and load it."""

    def __init__(self, ranks: int, layers: int, width: int, folder: Path) -> None:
        heads = width // 64
        model = Model(layers=layers, width=width, heads=heads, kv_heads=heads, ffn=width * 8 // 3, vocab_size=4096)
        self.config = Config(model=model, parallel=Parallel(dp_shard=ranks), train=Train(precision="fp32"))
        mesh = Mesh.build(self.config.parallel.layout, CPU)
        assert mesh is not None
        stages = {0: build_stage(resolve(self.config), mesh, 0)}
        self.state = State(stages, build_optimizer(stages.values(), self.config.model, self.config.optim))
        self.folder, self.group = folder, HostGroup()
        self.tensors = self.state.tensors()
        self.names = count(1)

    @property
    def bytes(self) -> int:
        """The bytes of all ranks."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())

    def local(self) -> dict[str, Tensor]:
        return {name: tensor.to_local() for name, tensor in self.tensors.items() if isinstance(tensor, DTensor)}

    @contextmanager
    def fresh_folder(self) -> Iterator[Path]:
        """A new folder, deleted with its files afterwards. Earlier writes reach the disk before it is yielded."""
        path = self.folder / f"save-{next(self.names)}"
        if self.group.leads:
            path.mkdir()
            os.sync()
        dist.barrier()
        yield path
        dist.barrier()
        if self.group.leads:
            shutil.rmtree(path)

    def work(self) -> None:
        """Take the time of some training."""
        x = torch.ones(self.config.model.width, self.config.model.width)
        for _ in range(PRODUCT_COUNT):
            x = x @ x
            x /= x.max()

    def saver(self, path: Path, in_background: bool) -> Saver:
        config = replace(self.config, checkpoint=Checkpoint(async_=in_background, keep=1))
        return Saver(self.state, config, (), path, self.group)


def together(work: Callable[[], object]) -> float:
    """The seconds until the last rank has done `work`."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def save_and_load(bench: Bench, saves: Timing, loads: Timing) -> None:
    """Run one round: every way saves and loads its own files."""
    rank, local = bench.group.rank, bench.local()

    def with_torch(file: Path) -> None:
        with file.open("wb") as stream:
            torch.save(local, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def from_torch(file: Path) -> None:
        for name, tensor in torch.load(file, weights_only=True).items():
            local[name].copy_(tensor)

    with bench.fresh_folder() as path, bench.saver(path, in_background=False) as saver:
        saves["megalite"].append(together(lambda: saver.save(Progress(step=1))))
        _check(saver)
        restorer = Restorer(bench.state, bench.config, (), bench.group)
        loads["megalite"].append(together(lambda: restorer.all(path / "step-00000001")))
    with bench.fresh_folder() as path:
        saves["dcp"].append(together(lambda: dcp.save(bench.tensors, checkpoint_id=path)))
        loads["dcp"].append(together(lambda: dcp.load(dict(bench.tensors), checkpoint_id=path)))
    with bench.fresh_folder() as path:
        saves["torch.save"].append(together(lambda: with_torch(path / f"{rank}.pt")))
        loads["torch.save"].append(together(lambda: from_torch(path / f"{rank}.pt")))


def load_memory(bench: Bench) -> dict[str, int]:
    """By way, the growth of resident memory to its peak during a load, in bytes, on the first rank."""
    with bench.fresh_folder() as path, bench.saver(path, in_background=False) as saver:
        saver.save(Progress(step=1))
        _check(saver)
        folder = path / "step-00000001"
        restorer = Restorer(bench.state, bench.config, (), bench.group)
        return {
            "megalite": _peak_growth(lambda: restorer.all(folder)),
            "dcp": _peak_growth(lambda: dcp.load(dict(bench.tensors), checkpoint_id=folder)),
        }


def _peak_growth(work: Callable[[], object]) -> int:
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    together(work)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """The resident bytes of this process: now (VmRSS) or at the peak (VmHWM)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _check(saver: Saver) -> None:
    for item in saver.news():
        if isinstance(item, Failed):
            raise InputError(f"--folder: {item.error}")


def _result_of(save: Future[Any] | AsyncSaveResponse) -> Callable[[], object]:
    """The call that waits until a checkpoint of torch.distributed.checkpoint is written."""
    return save.result if isinstance(save, Future) else save.upload_completion.result


def stalls(bench: Bench, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By way, for every asynchronous save: the seconds that training stands still, and all seconds lost.

    The first save of each way, which allocates memory, is left out.
    """
    apart = dist.new_group()  # its collectives run in a thread at the same time as training's
    stager = DefaultStager(StagingOptions(False, False, False, False))
    with bench.fresh_folder() as ours, bench.saver(ours, in_background=True) as saver:

        def save_ours(_: Path, step: int) -> Callable[[], object]:
            saver.save(Progress(step=step))
            return saver.finish

        def save_dcp(path: Path, step: int) -> Callable[[], object]:
            save = dcp.async_save(bench.tensors, checkpoint_id=path / str(step), process_group=apart)
            return _result_of(save)

        def save_kept(path: Path, step: int) -> Callable[[], object]:
            save = dcp.async_save(
                bench.tensors, checkpoint_id=path / str(step), process_group=apart, async_stager=stager
            )
            return _result_of(save)

        ways: dict[str, Callable[[Path, int], Callable[[], object]]] = {"megalite": save_ours, "dcp": save_dcp}
        if KEPT_STAGER:
            ways["dcp, kept stager"] = save_kept
        found: dict[str, dict[str, list[float]]] = {way: {"stall": [], "lost": []} for way in ways}
        for step in range(1, rounds + 2):
            for way, save in ways.items():
                with bench.fresh_folder() as path:
                    alone = together(bench.work)
                    stall, total = _while_training(partial(save, path, step), bench.work)
                if step > 1:
                    found[way]["stall"].append(stall)
                    found[way]["lost"].append(total - alone)
        saver.finish()
    stager.close()
    return found


def _while_training(save: Callable[[], Callable[[], object]], work: Callable[[], object]) -> tuple[float, float]:
    """The longest seconds that `save` stopped any rank, and the seconds of `save` and the work after it together."""
    dist.barrier()
    began = time.perf_counter()
    finish = save()
    stall = torch.tensor(time.perf_counter() - began)
    work()
    dist.barrier()
    total = time.perf_counter() - began
    finish()
    dist.all_reduce(stall, dist.ReduceOp.MAX)
    return stall.item(), total


def _measure(rank_info: RankInfo, options: argparse.Namespace, header: dict[str, Any]) -> None:
    bench = Bench(options.ranks, options.layers, options.width, Path(os.environ[FOLDER_VARIABLE]))
    local = Path(os.environ[LOCAL_FOLDER_VARIABLE])
    report = {**header, "ranks": options.ranks, "bytes": bench.bytes}
    if not options.tiers:
        report |= _measure_saves(bench, options.rounds)
    report["tiers"] = measure_tiers(bench.state, bench.config, bench.folder, local, options.rounds)
    if options.tiers:
        rhythm = Rhythm(options.pause, options.saves, options.every)
        report["standstill"] = measure_standstill(bench.state, bench.config, bench.folder, local, rhythm)
    dist.barrier()
    if rank_info.rank == 0:
        _show(report)
        name = "local_tier_cpu.json" if options.tiers else "checkpoint_cpu.json"
        write_object(Path(options.out or f"docs/benchmarks/{name}"), report)


def _measure_saves(bench: Bench, rounds: int) -> dict[str, Any]:
    saves: Timing = {"megalite": [], "dcp": [], "torch.save": []}
    loads: Timing = {way: [] for way in saves}
    for _ in range(rounds + 1):
        save_and_load(bench, saves, loads)
    for timing in (*saves.values(), *loads.values()):
        del timing[0]  # it warmed up
    return {
        "save_seconds": saves,
        "load_seconds": loads,
        "load_peak_bytes": load_memory(bench),
        "largest_part_bytes": max(part.nbytes for part in bench.local().values()),
        "asynchronous": stalls(bench, rounds),
    }


def _show_saves(terminal: Terminal, report: dict[str, Any]) -> None:
    size, rows = report["bytes"], []
    for what in ("save", "load"):
        timings = report[f"{what}_seconds"]
        for way, seconds in timings.items():
            ratios = [there / here for here, there in zip(seconds, timings["dcp"], strict=True)]
            rate = size / 2**30 / statistics.median(seconds)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append((f"{what}: {way}", f"{rate:.2f}", f"{statistics.median(ratios):.2f}", spread))
    terminal.table((":", "GiB/s", "throughput / dcp", "range"), rows)
    peaks = ", ".join(f"{way} {size / 2**20:.0f} MiB" for way, size in report["load_peak_bytes"].items())
    largest = report["largest_part_bytes"] / 2**20
    terminal.line(f"Memory of a load beside the state: {peaks}; the largest part of a tensor is {largest:.0f} MiB.")
    rows = []
    for way, found in report["asynchronous"].items():
        cells = (statistics.median(found["stall"]), max(found["stall"]), statistics.median(found["lost"]))
        rows.append((way, *(f"{1e3 * seconds:.0f}" for seconds in cells)))
    terminal.table(("asynchronous save:", "stall ms", "worst ms", "lost ms"), rows)


def _show(report: dict[str, Any]) -> None:
    terminal, size = Terminal(), report["bytes"]
    terminal.line(f"{size / 2**30:.2f} GiB of weights and moments on {report['ranks']} ranks; medians:")
    if "save_seconds" in report:
        _show_saves(terminal, report)
    columns, rows = ("stall", "complete", "durable", "back"), []
    for way, seconds in report["tiers"].items():
        medians = {name: f"{1e3 * statistics.median(times):.0f}" for name, times in seconds.items()}
        rows.append((way, *(medians.get(column, "") for column in columns)))
    terminal.table(("checkpoints, median ms:", *columns), rows)
    for way, found in report.get("standstill", {}).items():
        stood = found["stood_still"]
        share = sum(stood) / found["seconds"]
        terminal.line(
            f"{way}: {len(stood)} saves in {found['seconds']:.0f} s, of which training stood still for "
            f"{sum(stood):.1f} s ({share:.0%}), at most {max(stood):.1f} s; {found['lost']:.1f} s of work are lost "
            "in a crash, on average"
        )


if __name__ == "__main__":
    sys.exit(main())
