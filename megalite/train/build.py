"""From a configuration and a mesh to a job ready to train: the only place where parallelisms are composed."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from megalite.config.errors import InputError, Problem
from megalite.config.schema import Config
from megalite.data.loader import Micros
from megalite.dist.activity import Activity
from megalite.dist.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.optim.build import build_optimizer
from megalite.parallel.fsdp import compute_dtype, parameter_dtype, shard
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.linear import WeightGradients
from megalite.parallel.offload import AsIs, Offload
from megalite.parallel.pipeline import Activation, Pipeline
from megalite.parallel.recompute import recompute
from megalite.parallel.tensor import split_backward
from megalite.plan.pipeline import table_of, uses_fsdp
from megalite.plan.recompute import Mode, every_nth
from megalite.plan.split import layers_of, split_of
from megalite.schedule.actions import Table
from megalite.schedule.generate import build_forward
from megalite.train.recompute import recompute_modes
from megalite_kernels import apex
from megalite_kernels.backend import use_triton


@dataclass
class Job:
    """What one rank trains, and with what."""

    config: Config
    mesh: Mesh
    stages: dict[int, Decoder]  # by their number in the whole model, first to last
    weight_gradients: dict[int, WeightGradients]  # of the stages, where the schedule splits backward
    placement: tuple[int, ...]  # stage -> the pipeline rank that owns it
    optimizer: torch.optim.Optimizer
    activity: Activity  # where this rank notes what it is doing
    pipelines: dict[str, tuple[torch.Size, Pipeline]] = field(default_factory=dict)  # the latest, by shape of batch

    def training(self, batch: Micros) -> Pipeline:
        """The runner of a training step on `batch`."""
        return self._pipeline("training", batch.shape)

    def evaluation(self, batch: Micros) -> Pipeline:
        """The runner of a forward pass of `batch`."""
        return self._pipeline("evaluation", batch.shape)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by global name. The copies of a tied embedding share a name."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def _pipeline(self, purpose: str, shape: torch.Size) -> Pipeline:
        # The latest is enough: batches only grow, so a shape that is left does not come back.
        if purpose not in self.pipelines or self.pipelines[purpose][0] != shape:
            m = shape[0]
            table = table_of(self.config, m) if purpose == "training" else build_forward(self.placement, m)
            self.pipelines[purpose] = shape, build_pipeline(table, self, shape)
        return self.pipelines[purpose][1]


def build(config: Config, mesh: Mesh, activity: Activity | None = None) -> Job:
    """Build this rank's stages with their initial weights, and its optimizer.

    activity: where the rank notes what it is doing; None: nobody watches. Raises InputError for a schedule, and for
    kernels, that cannot run, and where there is no compiler.
    """
    check_kernels(config, mesh.device)
    if config.train.compile:
        check_compiler(mesh.device)
    table, pp = table_of(config), mesh.coordinates["pp"]
    modes = recompute_modes(config, mesh)
    memory = HostMemory()
    stages = {
        number: build_stage(config, mesh, number, table.stages, modes[number], memory) for number in table.stages_of(pp)
    }
    gradients = {number: split_backward(stage) for number, stage in stages.items()} if table.splits_backward else {}
    optimizer = build_optimizer(stages.values(), config.optim, config.kernels_by_operation.adamw)
    return Job(config, mesh, stages, gradients, table.placement, optimizer, activity or Activity())


def check_kernels(config: Config, device: torch.device) -> None:
    """Raises InputError for kernels that tensors on `device` cannot be given to."""
    for operation, backend in asdict(config.kernels_by_operation).items():
        try:
            if backend == "apex":
                apex.check(operation, device)
            else:
                use_triton(backend, device)
        except ValueError as error:
            key = "kernels" if isinstance(config.kernels, str) else f"kernels.{operation}"
            raise InputError(f"{key} = {backend}: {error}") from None


def check_compiler(device: torch.device) -> None:
    """Raises InputError where `torch.compile` has no compiler of C++, which it needs for a CPU."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        rule = f"needs a C++ compiler on a CPU, and there is no {compiler}"
        raise InputError([Problem("train.compile", rule, "install one, name one as CXX, or use false", True)])


def build_stage(
    config: Config,
    mesh: Mesh,
    number: int,
    stages: int,
    modes: Sequence[Mode] | None = None,
    memory: HostMemory | None = None,
) -> Decoder:
    """Stage `number` of the model's `stages`, sharded and filled.

    modes: what each of its layers recomputes in backward; None: nothing. memory: where activations wait if they are
    offloaded, shared by the stages of a rank.
    The order matters: compile wraps a layer's forward, recompute the result, since Dynamo leaves a checkpoint alone
    with all that is in it, and FSDP2 both; memory is taken only when every rank knows which part it holds.
    """
    layers, kernels = layers_of(split_of(config))[number], config.kernels_by_operation
    stage = Decoder(config.model, mesh.tp, layers, number == 0, number == stages - 1, kernels)
    stage.to(parameter_dtype(config.train.precision))
    keeping = Offload(memory) if config.train.offload_activations else AsIs
    for layer, mode in zip(stage.layers.values(), modes or every_nth("none", 1, len(stage.layers)), strict=True):
        if config.train.compile:
            layer.forward = torch.compile(layer.forward)
        recompute(layer, mode, keeping)
    if uses_fsdp(config):
        shard(stage, stage.gathered_apart(), mesh, config.train.precision, config.parallel.data)
    stage.to_empty(device=mesh.device)
    initialize(stage, config.model, config.run.seed)
    return stage


def build_pipeline(table: Table, job: Job, shape: torch.Size) -> Pipeline:
    """The runner of `table` for batches of `shape`, `[m, b, s + 1]`."""
    config, mesh = job.config, job.mesh
    _, micro, tokens = shape
    handed = ((tokens - 1) // (mesh.layout.tp * mesh.layout.cp), micro, config.model.width)
    activation = Activation(handed, compute_dtype(config.train.precision), mesh.device)
    rank, group, mode = mesh.coordinates["pp"], mesh.group("pp"), config.parallel.data.mode
    return Pipeline(table, job.stages, job.weight_gradients, rank, group, activation, mode, job.activity)
