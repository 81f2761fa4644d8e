"""From a configuration and a mesh to a job ready to train: the only place where parallelisms are composed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megalite.config.schema import Config
from megalite.dist.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.optim.build import build_optimizer
from megalite.parallel.fsdp import compute_dtype, parameter_dtype, shard
from megalite.parallel.linear import WeightGradients
from megalite.parallel.pipeline import Activation, Pipeline
from megalite.parallel.recompute import recompute_in_backward
from megalite.parallel.tensor import split_backward
from megalite.plan.pipeline import table_of
from megalite.plan.split import layers_of, split_of
from megalite.schedule.actions import Table
from megalite.schedule.generate import build_forward
from megalite.schedule.place import place_sharding


@dataclass
class Job:
    """What one rank trains, and with what."""

    config: Config
    mesh: Mesh
    stages: dict[int, Decoder]  # by their number in the whole model, first to last
    training: Pipeline
    evaluation: Pipeline
    optimizer: torch.optim.Optimizer

    @property
    def tokens_per_step(self) -> int:
        """Target tokens in a global batch; samples are packed, so every position has a target."""
        return self.config.batch.global_ * self.config.model.sequence_length

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage -> the pipeline rank that owns it."""
        return self.training.table.placement

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by global name. The copies of a tied embedding share a name."""
        for stage in self.stages.values():
            yield from stage.named_parameters()


def build(config: Config, mesh: Mesh) -> Job:
    """Build this rank's stages with their initial weights, its pipelines and its optimizer.

    Raises InputError for a schedule that cannot run.
    """
    table, pp = table_of(config), mesh.coordinates["pp"]
    stages = {number: build_stage(config, mesh, number, table.stages) for number in table.stages_of(pp)}
    gradients = {number: split_backward(stage) for number, stage in stages.items()} if table.splits_backward else {}
    forward = build_forward(table.placement, table.micro_batches)
    if any(isinstance(stage, FSDPModule) for stage in stages.values()):
        mode = config.parallel.data.mode
        table = place_sharding(table, gather=mode != "zero3", reduce_each=mode in ("zero2", "zero3"))
    training = build_pipeline(table, config, mesh, stages, gradients)
    evaluation = build_pipeline(forward, config, mesh, stages, {})
    return Job(config, mesh, stages, training, evaluation, build_optimizer(stages.values(), config.optim))


def build_stage(config: Config, mesh: Mesh, number: int, stages: int) -> Decoder:
    """Stage `number` of the model's `stages`, sharded and filled.

    The order matters: recompute wraps a layer's forward, compile the result, FSDP2 both; memory is taken
    only when every rank knows which part it holds.
    """
    stage = Decoder(
        config.model, mesh.tp, layers_of(split_of(config))[number], first=number == 0, last=number == stages - 1
    )
    stage.to(parameter_dtype(config.train.precision))
    for layer in stage.layers.values():
        if config.train.recompute == "full":
            recompute_in_backward(layer)
        if config.train.compile:
            layer.compile()
    shard(stage, stage.gathered_apart(), mesh, config.train.precision, config.parallel.data)
    stage.to_empty(device=mesh.device)
    initialize(stage, config.model, config.run.seed)
    return stage


def build_pipeline(
    table: Table, config: Config, mesh: Mesh, stages: dict[int, Decoder], gradients: dict[int, WeightGradients]
) -> Pipeline:
    """The runner of `table` for this rank."""
    model = config.model
    shape = (model.sequence_length // mesh.layout.tp, config.batch.micro_size, model.width)
    activation = Activation(shape, compute_dtype(config.train.precision), mesh.device)
    rank, group = mesh.coordinates["pp"], mesh.group("pp")
    return Pipeline(table, stages, gradients, rank, group, activation, config.parallel.data.mode)
