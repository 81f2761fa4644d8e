"""From a configuration and a mesh to a job ready to train: the only place where parallelisms are composed."""

from dataclasses import dataclass

import torch

from megalite.config.errors import InputError
from megalite.config.schema import Config
from megalite.dist.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.optim.build import build_optimizer
from megalite.parallel.fsdp import compute_dtype, parameter_dtype, shard
from megalite.parallel.pipeline import Activation, Pipeline
from megalite.parallel.recompute import recompute_in_backward
from megalite.plan.split import layers_of, split_of
from megalite.schedule.check import check
from megalite.schedule.generate import build as build_table


@dataclass
class Job:
    """What one rank trains, and with what."""

    config: Config
    mesh: Mesh
    stage: Decoder
    training: Pipeline
    evaluation: Pipeline
    optimizer: torch.optim.Optimizer

    @property
    def tokens_per_step(self) -> int:
        """Target tokens in a global batch; samples are packed, so every position has a target."""
        return self.config.batch.global_ * self.config.model.sequence_length


def build(config: Config, mesh: Mesh) -> Job:
    """Build this rank's stage with its initial weights, its pipelines and its optimizer.

    Raises InputError for a schedule that would deadlock or leave work undone.
    """
    stage = build_stage(config, mesh)
    micro_batches = config.batch.global_ // (config.batch.micro * mesh.layout.dp)
    training = build_pipeline(config.parallel.pipeline.schedule, micro_batches, config, mesh, stage)
    evaluation = build_pipeline("forward", micro_batches, config, mesh, stage)
    if problems := check(training.table):
        raise InputError(f"parallel.pipeline.schedule={training.table.name}: " + "; ".join(problems[:8]))
    return Job(config, mesh, stage, training, evaluation, build_optimizer(stage, config.optim))


def build_stage(config: Config, mesh: Mesh) -> Decoder:
    """This rank's stage of the model, sharded and filled.

    The order matters: recompute wraps a layer's forward, compile the result, FSDP2 both; memory is taken
    only when every rank knows which part it holds.
    """
    pp = mesh.coordinates["pp"]
    layers = layers_of(split_of(config))[pp]
    stage = Decoder(config.model, mesh.tp, layers, first=pp == 0, last=pp == mesh.layout.pp - 1)
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


def build_pipeline(schedule: str, micro_batches: int, config: Config, mesh: Mesh, stage: Decoder) -> Pipeline:
    """The runner of `schedule` for this rank."""
    model, pp = config.model, mesh.coordinates["pp"]
    shape = (model.sequence_length // mesh.layout.tp, config.batch.micro, model.width)
    activation = Activation(shape, compute_dtype(config.train.precision), mesh.device)
    table = build_table(schedule, mesh.layout.pp, micro_batches)
    return Pipeline(table, {pp: stage}, pp, mesh.group("pp"), activation, config.parallel.data)
