"""One rank of `megalite train`: from start-up to the end of the run."""

import logging
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megalite.checkpoint import store
from megalite.config.errors import InputError
from megalite.config.schema import Config, Source
from megalite.data.documents import end_of_document
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.dist.local import log_file
from megalite.dist.mesh import Mesh
from megalite.dist.ranks import Place
from megalite.dist.start import run_rank, start
from megalite.plan.batches import samples_after
from megalite.plan.fit import fit_micro
from megalite.train.build import Job, build
from megalite.train.folder import Folder
from megalite.train.loop import Batches, train
from megalite.train.metrics import CONVENTION
from megalite.train.report import Report, write_environment

FOR_TENSORS = 0.9  # of a GPU's memory; CUDA, NCCL and the allocator's fragments take the rest

log = logging.getLogger("megalite")


def run(place: Place, config: Config) -> int:
    """Train as the rank at `place`, in a run folder that is there; the exit code."""
    return run_rank(lambda: _train(place, config), place)


def _train(place: Place, config: Config) -> int:
    folder = Folder.of(config)
    logging.basicConfig(
        filename=log_file(folder.logs, place.rank),
        level=logging.INFO,
        format=f"%(asctime)s rank {place.rank} %(levelname)s %(message)s",
        force=True,
    )
    device = start(place, config.run.device, config.train.timeout)
    if config.batch.micro == "auto":
        config = fit_micro(config, device_memory(device))
    check_attention(config, device)
    if config.data.mask_documents:
        end = end_of_document(config.data, config.model.vocab_size)
        config = replace(config, data=replace(config.data, end_of_document=end))
    mesh = Mesh.build(config.parallel.layout, device, config.parallel.data.sharded)
    assert mesh is not None, "validation has compared the layout with the world size"
    job = build(config, mesh)
    at = "  ".join(f"{axis} {position}" for axis, position in mesh.coordinates.items())
    layers = ", ".join(layer for stage in job.stages.values() for layer in stage.layers)
    log.info("at %s: layers %s, %d parameters here", at, layers, _parameters_here(job))
    progress = resume(job, folder.checkpoints)
    batches = open_data(job)
    if place.rank != 0:
        train(job, batches, progress, folder.checkpoints, None)
        return 0
    write_environment(folder.path, config, place.world_size, _device_name(device))
    with Report(folder.path, config, progress.step) as report:
        announce(report, job, batches, progress)
        train(job, batches, progress, folder.checkpoints, report)
        report.say(f"done: {config.train.steps} steps, run folder {folder.path}")
    return 0


def check_attention(config: Config, device: torch.device) -> None:
    """Raises InputError where attention in blocks has no kernel: on CUDA, FlashAttention is all there is."""
    cp, method = config.parallel.cp, config.parallel.context.method
    if cp > 1 and method != "ulysses":
        key, value = "parallel.context.method", f"{method} with parallel.cp = {cp}"
    elif config.data.mask_documents:
        key, value = "data.mask_documents", "true"
    else:
        return
    if device.type == "cuda" and config.train.precision != "bf16":
        raise InputError(f"{key} = {value}: on CUDA needs train.precision = bf16, not {config.train.precision}")
    if device.type == "cuda" and (config.model.head_size % 8 or config.model.head_size > 256):
        size = config.model.head_size
        raise InputError(f"{key} = {value}: on CUDA needs heads of a multiple of 8, at most 256, not {size} wide")


def device_memory(device: torch.device) -> int | None:
    """Bytes for tensors on the smallest GPU of the job, None on CPU. Collective over all ranks."""
    if device.type != "cuda":
        return None
    total = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    dist.all_reduce(total, dist.ReduceOp.MIN)
    return int(total.item() * FOR_TENSORS)


def resume(job: Job, checkpoints: Path) -> store.Progress:
    """Continue as `checkpoint.resume` says; where the run stands then."""
    wanted = job.config.checkpoint.resume
    found = store.complete(checkpoints)
    path = Path(wanted) if wanted not in ("auto", "never") else found[-1] if found and wanted == "auto" else None
    if path is None:
        if found:
            raise InputError(
                f"checkpoint.resume = never, but {checkpoints} holds {found[-1].name}; "
                "give run.name another name, or resume with checkpoint.resume=auto"
            )
        return store.Progress(0, 0, asdict(job.config.model))
    progress = store.load(path, job.stages, job.optimizer, job.config)
    if found and store.step_of(found[-1]) > progress.step:
        raise InputError(
            f"checkpoint.resume = {wanted}, but {checkpoints} already holds {found[-1].name}, which is newer; "
            "continue from that with checkpoint.resume=auto, or give run.name another name"
        )
    log.info("resumed from %s", path)
    return progress


def open_data(job: Job) -> Batches:
    """Loaders of this rank's share of the training and validation data."""

    def loader(sources: list[Source]) -> Loader:
        config, mesh = job.config, job.mesh
        samples = Samples(sources, config.run.seed, config.model.sequence_length, config.model.vocab_size)
        pin = mesh.device.type == "cuda"
        return Loader(samples, config.batch.micro_size, mesh.layout.dp, mesh.dp_rank, pin)

    data = job.config.data
    return Batches(loader(data.train), loader(data.valid) if data.valid else None)


def announce(report: Report, job: Job, batches: Batches, progress: store.Progress) -> None:
    """Say what is about to be trained, on what."""
    config = job.config
    schedule, micro = config.parallel.pipeline.schedule, config.batch.micro
    report.say(f"{config.run.name}: {config.parallel.layout}, schedule {schedule}, micro-batches of {micro}")
    samples = batches.train.samples
    end = samples_after(config, config.train.steps - progress.step, progress.samples)
    for part, epochs in zip(samples.parts, samples.epochs(end), strict=True):
        report.say(f"data {part.path}: {part.tokens:,} tokens, {part.unused} at the tail unused, {epochs:.2f} epochs")
    if job.mesh.device.type == "cuda":
        report.say(CONVENTION)
    if progress.step:
        report.say(f"resuming at step {progress.step}, sample {progress.samples}")


def _parameters_here(job: Job) -> int:
    return sum(param.to_local().numel() for _, param in job.named_parameters() if isinstance(param, DTensor))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
