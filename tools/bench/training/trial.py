"""Measures one training step: builds an implementation, takes its steps, profiles it, and writes one row.

The order is that of worth: losses and times first, and noted at once; counts and a profile afterwards, whose failure
costs nothing of what is known by then.
"""

import gc
import gzip
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from megalite.base.errors import InputError
from megalite.base.secrets import command_without_secrets
from megalite.config.schema import Config
from megalite.data.loader import Micros
from megalite.distributed.start.ranks import RankInfo
from megalite.distributed.start.start import start, start_alone
from megalite.plan.model.size import flops_per_token
from megalite.train.build import build, build_mesh
from megalite.train.recompute_costs import plan_for
from megalite.train.step import train_step
from megalite_tools.bench.training.cases import MEGALITE, Case, Target
from megalite_tools.bench.training.kernel_kinds import Kernel, of_trace, summary
from megalite_tools.bench.training.peers import Runner
from megalite_tools.bench.training.prediction import cluster, mfu
from megalite_tools.bench.training.rows import CRASH, OK, OOM, REFUSAL
from megalite_tools.bench.training.sensors import Sensors

WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 20, 2  # steps
REHEARSAL_STEPS = 17  # timed steps of a rehearsal, so that curves have 20
TIMEOUT = 120.0  # seconds of a collective
PEERS = {"transformers": "huggingface", "liger": "liger", "torchtitan": "titan"}  # modules, with `build`
PACKAGES = ("megalite", "torch", "triton", "transformers", "liger-kernel", "torchtitan", "torchao", "numpy")
Note = Callable[[Mapping[str, Any]], None]


def measure(case: Case, target: Target, rank_info: RankInfo | None, note: Note, traces: Path) -> dict[str, Any]:
    """Measure a case on this rank. Returns what its row has, as `note` is given it while it grows.

    traces: a folder for the trace of a case that wants one. Raises InputError for what an implementation cannot do.
    """
    config = case.config(target.device)
    row: dict[str, Any] = {
        "status": CRASH,
        "settings": settings(config, case.selective),
        "versions": versions(),
        "argv": command_without_secrets(sys.orig_argv),
    }

    def stage(name: str, **known: Any) -> None:
        row.update(known, stage=name)
        note(row)

    stage("starting")
    device = start(rank_info, target.device, TIMEOUT) if rank_info else start_alone(target.device)
    gc.disable()
    stage("building", device=described(device))
    runner, tokens = built(case, config, device)
    stage("taking the first steps, which compile")
    timer = Timer(device)
    _Compiled.reset()
    losses, first = [], time.perf_counter()
    losses.append(runner(tokens, 0))
    timer.synchronize()
    first = time.perf_counter() - first
    losses += [runner(tokens, number) for number in range(1, WARM_STEPS)]
    timer.synchronize()
    before = _Compiled.graphs()
    timer.reset_peak()
    stage("taking steps", loss=[loss.item() for loss, _ in losses])
    with Sensors(device.index if device.type == "cuda" else None) as sensors:
        for number in range(WARM_STEPS, WARM_STEPS + (REHEARSAL_STEPS if target.tiny else TIMED_STEPS)):
            timer.mark()
            losses.append(runner(tokens, number))
        timer.mark()
        seconds = timer.seconds()
    median = statistics.median(seconds)
    curve = torch.stack([torch.stack([loss.double(), norm.double()]) for loss, norm in losses]).T.tolist()
    stage(
        "counting synchronisations",
        status=OK,
        step_ms=spread_ms(seconds),
        tok_s=config.batch.global_ * config.model.sequence_length / median / case.ranks,
        **mfu(config, median, cluster(target), case.ranks),
        flops={how: flops_per_token(config.model, how) for how in ("full", "causal")},
        **timer.peak(),
        **sensors.readings,
        loss=curve[0],
        grad_norm=curve[1],
        compile_s=round(max(0.0, first - median), 2) if config.train.compile else 0.0,
        graphs=_Compiled.graphs(),
        breaks=_Compiled.breaks(),
        recompiles=_Compiled.graphs() - before,
    )
    following = len(losses)
    stage("profiling", syncs_per_step=synchronisations(lambda: runner(tokens, following), device))
    kept = traces / f"{case.id}.json.gz" if case.trace and (rank_info is None or rank_info.rank == 0) else None
    row.update(profiled(lambda number: runner(tokens, following + 1 + number), device, traces, kept))
    row.pop("stage")
    return row


def outcome(error: BaseException, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a case whose error is a result: too little memory, or something that is not there.

    Raises any other error again.
    """
    if isinstance(error, InputError):
        return {"status": REFUSAL, "reason": str(error)}
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        at = f"while {row['stage']}" if row.get("stage") else ""
        return {"status": OOM, "reason": f"out of memory {at}".strip(), "tail": str(error)[:2000]}
    raise error


def built(case: Case, config: Config, device: torch.device) -> tuple[Runner, Tensor]:
    """The implementation of a case, and this rank's `[m, b, s + 1]` tokens, the same at every step."""
    if case.implementation == MEGALITE:
        mesh = build_mesh(config, device)
        assert mesh is not None
        job = build(plan_for(config, mesh), mesh)
        place = config.parallel.layout.dp_rank(mesh.rank)

        def ours(tokens: Tensor, number: int) -> tuple[Tensor, Tensor]:
            signs = train_step(job, Micros.cut_at(tokens, None), number)
            return signs.loss, signs.norm

        runner: Runner = ours
    else:
        place = torch.distributed.get_rank()
        runner = _peer(case.implementation).build(case, config, device)
    size = config.batch.global_, config.model.sequence_length + 1
    generator = torch.Generator(device).manual_seed(config.run.seed)
    every = torch.randint(config.model.vocab_size, size, generator=generator, device=device)
    mine = every[place :: config.parallel.layout.dp]
    return runner, mine.unflatten(0, (-1, config.batch.micro_size))


def _peer(name: str) -> ModuleType:
    """The module of another program. Raises InputError where that program is not there."""
    try:
        return import_module(f"megalite_tools.bench.training.{PEERS[name]}")
    except ImportError as error:
        raise InputError(f"{name} cannot be imported here ({error}); pip install 'megalite[hf,gpu]'") from error


class Timer:
    """Times steps: by events on a GPU, which nothing waits for, and by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, []  # type: ignore[var-annotated]

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between every mark and the next."""
        self.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cuda":
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> dict[str, int]:
        """Bytes of a GPU's memory at most since `reset_peak`."""
        if self._device.type != "cuda":
            return {}
        allocated, reserved = (
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
        )
        return {"peak_alloc": allocated, "peak_reserved": reserved}


def spread_ms(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    figures = {"median": statistics.median(seconds), "p10": tenths[0], "p90": tenths[-1]}
    return {name: round(1e3 * value, 4) for name, value in figures.items()}


class _Compiled:
    """Counts what torch.compile has made in this process."""

    @staticmethod
    def reset() -> None:
        counters.clear()

    @staticmethod
    def graphs() -> int:
        return int(counters["stats"]["unique_graphs"])

    @staticmethod
    def breaks() -> int:
        return sum(counters["graph_break"].values())


def synchronisations(step: Callable[[], object], device: torch.device) -> int | None:
    """Count how often the host waits for the GPU in a step; None on a CPU."""
    if device.type != "cuda":
        step()
        return None
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in told)  # one tells of the mode itself


def profiled(step: Callable[[int], object], device: torch.device, folder: Path, kept: Path | None) -> dict[str, Any]:
    """Profile some steps, and summarize their kernels. kept: where its trace goes, compressed; None: nowhere."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for number in range(PROFILED_STEPS):
            step(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"trace.{torch.distributed.get_rank()}.json"
    profiler.export_chrome_trace(str(trace))
    try:
        if kept is not None:
            kept.write_bytes(gzip.compress(trace.read_bytes(), 5))
        if device.type == "cuda":
            kernels, gap = of_trace(json.loads(trace.read_bytes())["traceEvents"])
            return summary(kernels, PROFILED_STEPS, gap)
    finally:
        trace.unlink()
    averages = profiler.key_averages()
    told = [Kernel(each.key, each.count, each.self_cpu_time_total / 1e3) for each in averages]
    return summary([kernel for kernel in told if "::" in kernel.name], PROFILED_STEPS)


def settings(config: Config, selective: bool = False) -> dict[str, Any]:
    """The settings that a table shows. selective: as in `Case`."""
    layout, kernels = config.parallel.layout, config.kernels
    return {
        "micro": config.batch.micro_size,
        "accumulation": config.batch.global_ // (config.batch.micro_size * layout.dp),
        "sequence": config.model.sequence_length,
        "compile": config.train.compile,
        "cuda_graph": config.train.cuda_graph,
        "recompute": "selective" if selective else config.train.recompute,
        "kernels": kernels if isinstance(kernels, str) else vars(kernels),
        "mode": config.parallel.data_mode,
        "overlap": config.parallel.tensor.overlap,
        "layout": str(layout),
        "precision": config.train.precision,
    }


def described(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }


def versions() -> dict[str, str]:
    """Versions of what takes part, as far as it is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found
