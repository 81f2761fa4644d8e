"""Jobs on the ranks of the test suite, and the global tensors they hold, put together from parts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.checkpoint.run.load import Restorer
from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.files import Writer
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.manifest import Source
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.save_events import Failed, Saved
from megalite.checkpoint.store.state import State
from megalite.commands.verify import RankPart, random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel, Pipeline
from megalite.config.schema import Batch, Config, LearningRate, Optim, Train
from megalite.parallel.parameter import cut, extra_state, parameters
from megalite.plan.resolved import resolve
from megalite.train.build import Job, build, build_mesh
from megalite.train.step import train_step

CPU = torch.device("cpu")
MODEL = Model(layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocab_size=32, sequence_length=8, qkv_bias=True)
Parts = dict[str, RankPart]


def config_of(layout: Layout, model: Model = MODEL, schedule: str = "1f1b") -> Config:
    """Two micro-batches a step, one for eight data-parallel ranks; of four stages, the ends have no layer."""
    pipeline = Pipeline(schedule)
    if layout.pp * pipeline.stages_per_rank == 4:
        pipeline.split = [0, 1, 1, 0]
    return Config(
        model=model,
        parallel=Parallel(layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep, pipeline),
        batch=Batch(micro=max(1, 4 // layout.dp), global_=8),
        train=Train(steps=6, precision="fp64"),
        optim=Optim(lr=0.01),
        schedule=LearningRate("cosine", warmup=2),
    )


@contextmanager
def one_rank() -> Iterator[None]:
    """This process as a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make(config: Config) -> Job:
    mesh = build_mesh(config, CPU)
    assert mesh is not None, "checkpoints are collective over all ranks, so the layout must take them all"
    return build(resolve(config), mesh)


def advance(job: Job, first: int, last: int) -> list[float]:
    """Take steps `first` to `last` − 1, each on tokens of its own; their losses."""
    return [train_step(job, random_batch(job, step), step).read().loss for step in range(first, last)]


def parts(job: Job) -> Parts:
    """This rank's parts of all weights, optimizer states and extra state, without padding, which is 0."""
    found: Parts = {}
    for name, param, _, shape in (each for stage in job.stages.values() for each in parameters(stage)):
        states = job.optimizer.states_of(param).items() if param.requires_grad else ()
        here = {name: param, **{f"{name} {state}": tensor for state, tensor in states if state != "step"}}
        for key, tensor in here.items():
            part = RankPart.of(cut(tensor, shape))
            assert not tensor.to_local()[len(part.values) :].any(), f"{key}: padding is not 0"
            assert key not in found or found[key].values.equal(part.values), f"{key}: the copies differ"
            found[key] = part
    extra = (each for stage in job.stages.values() for each in extra_state(stage))
    return found | {each.name: RankPart.of(cut(each.value, each.shape)) for each in extra}


def saver(
    job: Job, folder: Path, base: int | None = None, config: Config | None = None, data: tuple[Source, ...] = ()
) -> Saver:
    return Saver(state_of(job), config or job.config, data, folder, HostGroup(), base=base)


def restorer(job: Job, config: Config | None = None) -> Restorer:
    return Restorer(state_of(job), config or job.config, (), HostGroup())


def state_of(job: Job) -> State:
    return State(job.stages, job.optimizer, job.config.adapter is not None)


def progress_at(job: Job, step: int) -> Progress:
    samples = step * job.config.batch.global_
    return Progress(step, step, samples, samples * job.config.model.sequence_length)


def save(job: Job, folder: Path, step: int, base: int | None = None) -> Path:
    """Save, and wait until it is durable. base: the number of an adapter's."""
    with saver(job, folder, base) as writer:
        writer.save(progress_at(job, step))
        writer.finish()
    return folder / f"step-{step:08d}"


def staged_bytes(config: Config, folder: Path) -> tuple[int, int]:
    """This pipeline rank, and the bytes of host memory that a save of it takes."""
    job = make(config)
    with saver(job, folder) as writer:
        copies = writer._stage(writer.state.tensors()).values()
    return job.mesh.coordinates["pp"], sum(copy.untyped_storage().nbytes() for copy in copies)


def train_and_save(config: Config, folder: Path, at: int, steps: int = 0) -> tuple[list[float], Parts]:
    """Train from the beginning, save after step `at`, and go on up to `steps`."""
    job, base = make(config), None
    if config.checkpoint.weights is not None:
        loading = restorer(job)
        loading.weights(config.checkpoint.weights)
        base = loading.base
    losses = advance(job, 0, at)
    save(job, folder, at, base)
    return losses + advance(job, at, steps), parts(job)


Loaded = tuple[Progress, Parts, list[float], Parts]  # what was loaded, losses, and what comes of it


def load_and_train(config: Config, path: Path, steps: int) -> Loaded:
    """Load into a job that has other weights, and train until `steps` steps are taken."""
    return load_each(config, [path], steps)[0]


def load_each(config: Config, paths: Sequence[Path], steps: int) -> list[Loaded]:
    """`load_and_train` of one after the other, all into one job, which trains after the last alone."""
    job, results = make(replace(config, run=replace(config.run, seed=99))), []
    for path in paths:
        if results:
            spoil(job)
        progress = restorer(job, config).all(path)
        loaded = parts(job)
        states = [job.optimizer.states_of(param) for _, param in job.named_parameters() if param.requires_grad]
        assert {state["step"].item() for state in states if "step" in state} == {progress.updates}
        results.append((progress, loaded, [], {}))
    progress, loaded, *_ = results.pop()
    return [*results, (progress, loaded, advance(job, progress.step, steps), parts(job))]


@torch.no_grad()
def spoil(job: Job) -> None:
    """Change all weights and states, so that what the next load leaves out cannot look as if it were loaded."""
    for _, param in job.named_parameters():
        for tensor in (param, *job.optimizer.states_of(param).values()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.mul_(-2)  # padding stays 0


def fail_on_one_rank(config: Config, folder: Path, where: str) -> tuple[str, list[int]]:
    """Save twice, the first time with a fault of rank 5; the error, and the steps saved after it."""
    job = make(config)
    write = Writer.write

    def faulty(writer: Writer, *args: Any) -> Any:
        if where == "writing":
            raise OSError("the disk of rank 5 is broken")
        results = write(writer, *args)
        next(writer.path.glob("__5_*")).unlink()  # as the first rank sees a file system of another node
        return results

    with saver(job, folder) as writer:
        if dist.get_rank() == 5:
            Writer.write = faulty  # type: ignore[method-assign]
        try:
            writer.save(progress_at(job, 1))
            writer.wait()
        finally:
            Writer.write = write  # type: ignore[method-assign]
        (failed,) = writer.news()
        assert isinstance(failed, Failed)
        writer.save(progress_at(job, 2))
        writer.finish()
        return failed.error, [item.step for item in writer.news() if isinstance(item, Saved)]


def load_newest(config: Config, folder: Path) -> tuple[int, list[str]]:
    """The step that a run would continue from, and what was said about others."""
    said: list[str] = []
    progress = restorer(make(config)).newest(folder, said.append)
    return progress.step if progress else 0, said


def load_weights(config: Config, path: Path) -> tuple[Parts, bool]:
    """The weights alone, and whether the optimizer was left untouched."""
    job = make(replace(config, run=replace(config.run, seed=99)))
    restorer(job, config).weights(str(path))
    untouched = not job.optimizer.state
    return {name: part for name, part in parts(job).items() if " " not in name}, untouched


def empty_parts(found: list[Parts]) -> int:
    return sum(part.values.numel() == 0 for rank in found for part in rank.values())


def assemble(found: list[Parts]) -> dict[str, Tensor]:
    """Global tensors from the parts of all ranks, which must cover them and agree where they overlap."""
    whole: dict[str, Tensor] = {}
    for name in sorted(set().union(*found)):
        here = [rank[name] for rank in found if name in rank and rank[name].values.numel()]
        shape = [max(part.box[dim].stop for part in here) for dim in range(here[0].values.ndim)]
        whole[name] = torch.full(shape, torch.nan, dtype=here[0].values.dtype)
        for part in here:
            view = whole[name][part.box]
            assert torch.equal(torch.where(view.isnan(), part.values, view), part.values), f"{name}: copies differ"
            view.copy_(part.values)
        assert not whole[name].isnan().any(), f"{name}: not covered"
    return whole
