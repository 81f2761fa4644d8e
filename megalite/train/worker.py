"""One rank of `megalite train`: from start-up to the end of the run."""

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.base.errors import InputError, counted
from megalite.base.exit_codes import ExitCode
from megalite.base.output import LogFile, Outlet, go_on, standard_streams, warn
from megalite.base.secrets import without_secrets
from megalite.checkpoint.local.tier import Tier
from megalite.checkpoint.run.load import Restorer
from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.state import State
from megalite.config.attention_kernels import attention_heads, kernel_lines
from megalite.config.identity import same_everywhere
from megalite.config.schema import Config, Source
from megalite.cost.stages import Timer
from megalite.data.check import Checked, Scans, check_data
from megalite.data.loader import Loader
from megalite.distributed.deterministic import be_deterministic
from megalite.distributed.health.activity import Activity
from megalite.distributed.health.watchdog import watched
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.host import host_memory
from megalite.distributed.start.local import MEETING, log_file
from megalite.distributed.start.meeting import meet
from megalite.distributed.start.ranks import RankInfo
from megalite.distributed.start.signals import ignore_stops
from megalite.distributed.start.start import run_rank, start
from megalite.parallel.parameter import cut, parameters
from megalite.plan.automatic import Costing
from megalite.plan.batches import GlobalBatch, samples_after
from megalite.plan.float8 import float8_text
from megalite.plan.memory.fit import TENSOR_SHARE, check_memory, fitted
from megalite.plan.memory.remedies import out_of_memory_text
from megalite.plan.overlap import overlap_text
from megalite.plan.pipeline import uses_fsdp
from megalite.plan.routing import routing_notes
from megalite.train.build import Job, build, build_mesh
from megalite.train.compile_time import CompileTime, progressing
from megalite.train.folder.paths import Folder
from megalite.train.folder.starts import record_start
from megalite.train.guard import Requests
from megalite.train.loop import Batches, Follower, train
from megalite.train.metrics import CONVENTION, Meter
from megalite.train.order_costs import cluster_of_run, schedule_text, searched_order, shared_costing
from megalite.train.pace import Pace
from megalite.train.profiler import Profiler
from megalite.train.recompute_costs import plan_for
from megalite.train.report import Report, Silent
from megalite.train.sources import as_remembered, open_samples
from megalite.train.stragglers import Stragglers
from megalite_launch.base.run_folder import node_name

PATIENCE = 10  # time limit of a collective, in train.timeout: the watchdog speaks first, and knows who is slow but busy

log = logging.getLogger("megalite")


def run(rank_info: RankInfo, config: Config, check_owner: Callable[[], None]) -> int:
    """Train as the rank `rank_info`, in a run folder that exists. Returns the exit code.

    check_owner: called before checkpoints and records change; does not return if the folder has become another job's.
    """
    return run_rank(lambda: _watched(rank_info, config, check_owner), rank_info)


def _watched(rank_info: RankInfo, config: Config, check_owner: Callable[[], None]) -> int:
    standard_streams(go_on)
    folder, timeout, activity = Folder.of(config), config.train.timeout, Activity()
    meeting = meet(rank_info, timeout, same_everywhere(config))
    # Rank 0 owns the run folder: from here on all may write there.
    logging.basicConfig(
        handlers=[LogFile(log_file(folder.logs, rank_info.rank))],
        level=logging.INFO,
        format=f"%(asctime)s rank {rank_info.rank} %(levelname)s %(message)s",
        force=True,
    )
    with watched(meeting, rank_info, activity, timeout, folder.flights):
        if config.train.deterministic:
            be_deterministic()
        device = start(rank_info, config.run.device, PATIENCE * timeout, meeting)
        code = _train(rank_info, config, device, activity, check_owner)
        ignore_stops()
        return code


def _train(
    rank_info: RankInfo, config: Config, device: torch.device, activity: Activity, check_owner: Callable[[], None]
) -> int:
    folder = Folder.of(config)
    here = replace(config, run=replace(config.run, device="cuda" if device.type == "cuda" else "cpu"))
    group = HostGroup()
    cluster = group.once(partial(cluster_of_run, config, device))
    asked = config.batch.micro
    of_any = None if cluster is None else Timer(cluster).costs
    here = group.once(partial(fitted, here, device_memory(device), costing=of_any))
    config = replace(config, batch=here.batch, parallel=here.parallel)
    costing = shared_costing(here, cluster, group)
    # A local launcher has compared its ranks on CPUs.
    if asked != "auto" and (MEETING not in os.environ or device.type == "cuda"):
        told = check_memory(here, *smallest_memory(device), costing=costing)
        if told and rank_info.rank == 0:
            warn(told)
    check_attention(config, device)
    activity("checking the data")  # rank 0 does; a local launcher has refused what it could before there were ranks
    checked = group.once(partial(check_and_keep, config, folder, activity.tick))
    if config.data.mask_documents:
        config = replace(config, data=replace(config.data, end_of_document=checked.end_of_document))
    if rank_info.rank == 0:
        for text in checked.warnings:
            warn(text)
    with explained(config, device):
        return _train_here(rank_info, config, device, activity, check_owner, group, costing, checked)


def _train_here(
    rank_info: RankInfo,
    config: Config,
    device: torch.device,
    activity: Activity,
    check_owner: Callable[[], None],
    group: HostGroup,
    costing: Costing | None,
    checked: Checked,
) -> int:
    """Train by a configuration that has been checked and fitted. Returns the exit code."""
    folder = Folder.of(config)
    activity("connecting to the other ranks")
    patience = timedelta(seconds=PATIENCE * config.train.timeout)
    mesh = build_mesh(config, device, patience)
    assert mesh is not None, "validation has compared the layout with the world size"
    activity("building the model")
    plan = plan_for(config, mesh, costing)
    job = build(plan, mesh, activity)
    at = "  ".join(f"{axis} {position}" for axis, position in mesh.coordinates.items())
    layers = ", ".join(layer for stage in job.stages.values() for layer in stage.layers)
    log.info("at %s: layers %s, %s here", at, layers, _parameters_here(job))
    recomputed = Counter(mode for stage in job.stages for mode in plan.modes[stage])
    log.info("recompute of layers: %s", ", ".join(f"{count} {mode}" for mode, count in recomputed.items()))
    batches = open_data(job)
    data = as_remembered(config.data.train, batches.train.samples)
    state = State(job.stages, job.optimizer, config.adapter is not None, job.mesh.device)
    local = config.checkpoint.local
    tier = Tier(config, folder.checkpoints, group, job.activity.tick, check_owner) if local is not None else None
    restorer = Restorer(state, config, data, group, job.activity.tick, check_owner, tier)
    reload = partial(restorer.newest, folder.checkpoints, warn)
    progress = begin(config, restorer, reload)
    requests = Requests()
    activity.asked = requests.received
    requests.listen()
    with Saver(
        state, config, data, folder.checkpoints, group, job.activity.tick, check_owner, tier, restorer.base
    ) as saver:
        devices = gather_devices(mesh)
        nodes = gather_nodes(mesh)
        activity("exporting")
        for problem in saver.export_missing(progress.step):
            if rank_info.rank == 0:
                warn(problem)
        compares = mesh.layout.world_size > 1
        followers = [naming(Stragglers(mesh, job.clock, nodes))] if compares else []
        timing = job.clock.running() if compares else nullcontext()
        compiling = progressing(job.activity) if config.train.compile else nullcontext()
        profiler = Profiler.of(job, folder.path, progress.step, check_owner)
        followers += [profiler.stepped] if profiler is not None else []
        if rank_info.rank != 0:
            with timing, compiling, profiler or nullcontext():
                return train(job, batches, progress, saver, reload, Silent(), followers)
        with Outlet(str(folder.path / "starts"), failures=(OSError, InputError)):
            check_owner()
            record_start(folder.path, config, devices, progress, searched_order(job))
        with Report(folder.path, config, progress.step, check_owner) as report:
            if progress.step < config.train.steps:
                announce(report, job, batches, progress)
            pace = Pace.of(job, progress.step, report)
            followers += [pace.stepped] if pace is not None else []
            followers += [CompileTime().stepped] if config.train.compile else []
            with timing, compiling, profiler or nullcontext():
                code = train(job, batches, progress, saver, reload, report, followers)
            if code == ExitCode.DONE:
                text = f"{outcome(config.train.steps, progress.step)}, run folder {folder.path}"
                report.event(report.step, "done", text)
            return code


@contextmanager
def explained(config: Config, device: torch.device) -> Iterator[None]:
    """Add to the error of a GPU without memory what fills it and what would make it fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        with suppress(InputError):  # no plan, no explanation
            here = replace(config, run=replace(config.run, device="cuda"))
            error.add_note(out_of_memory_text(here, torch.cuda.get_device_properties(device).total_memory))
        raise


def naming(stragglers: Stragglers) -> Follower:
    """A follower of the loop that reports slow ranks."""

    def follow(step: int, _: GlobalBatch, meter: Meter, report: Silent) -> None:
        for found in stragglers.stepped(meter.latest_wait):
            report.straggler(step, found)

    return follow


def check_and_keep(config: Config, folder: Folder, tick: Callable[[], None]) -> Checked:
    """Run `check_data`, and keep the results of its scans in the run folder. Raises InputError."""
    scans = Scans(folder.data)
    checked = check_data(config.data, config.model, scans, tick)
    scans.keep()
    return checked


def outcome(steps: int, first: int) -> str:
    """The last message of a run that ended well. first: the step at which this start began."""
    if first < steps:
        return f"done: {counted(steps, 'step')}"
    return f"nothing to do: the run stands at step {first} and train.steps = {steps}; raise train.steps to go on"


def check_attention(config: Config, device: torch.device) -> None:
    """Raises InputError if attention in blocks has no kernel: on CUDA, only FlashAttention can do it."""
    cp, method = config.parallel.cp, config.parallel.context.method
    if cp > 1 and method != "ulysses":
        key, value = "parallel.context.method", f"{method} with parallel.cp = {cp}"
    elif config.data.mask_documents:
        key, value = "data.mask_documents", "true"
    else:
        return
    if device.type == "cuda" and config.train.dtype != "bf16":
        raise InputError(f"{key} = {value}: on CUDA needs train.precision = bf16, not {config.train.dtype}")
    if device.type == "cuda" and (config.model.head_size % 8 or config.model.head_size > 256):
        size = config.model.head_size
        raise InputError(f"{key} = {value}: on CUDA needs heads of a multiple of 8, at most 256, not {size} wide")


def device_memory(device: torch.device) -> int | None:
    """Bytes for tensors on the smallest GPU of the job; None on CPUs. Collective over all ranks."""
    return int(smallest_memory(device)[0] * TENSOR_SHARE) if device.type == "cuda" else None


def smallest_memory(device: torch.device) -> tuple[int, str, int | None]:
    """The smallest memory of the job: its bytes, its name, and how many ranks share it, which is None for a GPU.

    Collective over all ranks.
    """
    if device.type == "cuda":
        total = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
        dist.all_reduce(total, dist.ReduceOp.MIN)
        return int(total.item()), "the smallest GPU", None
    found = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), host_memory()))
    together = Counter(host for host, _ in found)
    host, memory = min(found, key=lambda each: each[1] / together[each[0]])
    return memory, f"the memory of {host}", together[host]


def begin(config: Config, restorer: Restorer, reload: Callable[..., Progress | None]) -> Progress:
    """Load the checkpoint that `checkpoint.resume` or `checkpoint.weights` asks for, if any.

    Returns the progress to start from.
    """
    checkpoint = config.checkpoint
    if checkpoint.resume not in ("auto", "never"):
        return restorer.all(Path(checkpoint.resume))
    progress = reload() if checkpoint.resume == "auto" else None
    if progress is None and checkpoint.weights is not None:
        restorer.weights(checkpoint.weights)
        if config.adapter is not None and config.adapter.weights is not None:
            restorer.factors(config.adapter.weights)
    return progress or Progress()


def open_data(job: Job) -> Batches:
    """The loaders of this rank's share of the training and validation data."""

    def loader(sources: list[Source]) -> Loader:
        config, mesh = job.config, job.mesh
        pin = mesh.device.type == "cuda"
        return Loader(open_samples(config, sources), config.batch.micro_size, mesh.layout.dp, mesh.dp_rank, pin)

    data = job.config.data
    alone = {source.path: loader([source]) for source in data.valid} if len(data.valid) > 1 else {}
    return Batches(loader(data.train), loader(data.valid) if data.valid else None, alone)


def announce(report: Report, job: Job, batches: Batches, progress: Progress) -> None:
    """Tell what is about to be trained, and on what."""
    config = job.config
    micro = config.batch.micro
    mode = f" {config.parallel.data_mode}" if uses_fsdp(config) else ""
    report.say(f"{config.run.name}: {config.parallel.layout}{mode}, {schedule_text(job)}, micro-batches of {micro}")
    samples = batches.train.samples
    end = samples_after(config, config.train.steps - progress.step, progress.samples, progress.left_out)
    for part, epochs in zip(samples.parts, samples.epochs(end), strict=True):
        told = f"{part.tokens:,} tokens, {part.unused} at the tail unused, {epochs:.2f} epochs"
        report.say(f"data {without_secrets(part.path)}: {told}")
    for line in kernel_lines(config, [job.attention[heads.scores] for heads in attention_heads(config)]):
        report.say(f"attention: {line}")
    on_cpu = job.mesh.device.type == "cpu"
    for told in (overlap_text(config, job.fused.reason, on_cpu), float8_text(config)):
        if told:
            report.say(told)
    for name, text in routing_notes(config).items():
        report.event(progress.step, name, text)
    if job.mesh.device.type == "cuda":
        report.say(CONVENTION)
    if progress.step:
        report.say(f"resuming at step {progress.step}, sample {progress.samples}")


def _parameters_here(job: Job) -> str:
    """The number of parameters on this rank, without padding, and of those that are trained where it differs."""
    found = Counter[bool]()
    for each in chain.from_iterable(map(parameters, job.stages.values())):
        found[each.value.requires_grad] += cut(each.value, each.shape).to_local().numel()
    return f"{found.total()} parameters" + (f", {found[True]} of them trained," if found[False] else "")


def gather_nodes(mesh: Mesh) -> list[str]:
    """The node of every rank, as the launcher names it. Collective."""
    nodes = [""] * mesh.layout.world_size
    dist.all_gather_object(nodes, node_name(), group=mesh.world)
    return nodes


def gather_devices(mesh: Mesh) -> list[tuple[str, str]]:
    """The host and device of every rank. Collective."""
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    devices = [("", "")] * mesh.layout.world_size
    dist.all_gather_object(devices, (socket.gethostname(), device), group=mesh.world)
    return devices
