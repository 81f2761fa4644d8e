"""Builds a job from a configuration and a mesh: the only place where parallelisms are composed."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn

from megalite.base.errors import InputError, Problem
from megalite.config.attention_kernels import Choice
from megalite.config.layers import Scores
from megalite.config.schema import Config
from megalite.data.loader import Micros
from megalite.distributed.health.activity import Activity
from megalite.distributed.health.clock import SectionClock
from megalite.distributed.mesh import Mesh
from megalite.model.adapters import seed_dropout
from megalite.model.decoder import Decoder, Layer
from megalite.model.init import initialize
from megalite.model.positions import TokenPositions
from megalite.optim.build import build_optimizer
from megalite.optim.interface import Optimizer
from megalite.parallel.copies import Copies
from megalite.parallel.float8 import WeightCasts, check_float8, use_float8
from megalite.parallel.fsdp import compute_dtype, parameter_dtype, shard
from megalite.parallel.gradients import Gradients
from megalite.parallel.graphed import Capture, GraphedPipeline, captures_on
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.host_parameters import keep_on_host, materialize
from megalite.parallel.linear import WeightGradients
from megalite.parallel.offload import AsIs, Offload
from megalite.parallel.parameter import in_four_bits
from megalite.parallel.pipeline import Activation, Pipeline
from megalite.parallel.product import Plain, Product, product_of
from megalite.parallel.recompute import recompute
from megalite.parallel.settled_attention import attention_kernels
from megalite.parallel.settled_symmetric import Fused, fused_products
from megalite.parallel.tensor import split_backward, use_product, use_symmetric
from megalite.plan.float8 import wide_weights
from megalite.plan.pipeline import micro_batches
from megalite.plan.resolved import Plan
from megalite.schedule.actions import Table
from megalite.schedule.generate import build_forward
from megalite.train.expert_load import ExpertLoad
from megalite_kernels import apex
from megalite_kernels.backend import use_triton

Runner = Pipeline | GraphedPipeline


@dataclass
class Job:
    """The parts of one rank's training: its stages of the model, optimizer, mesh and pipelines."""

    plan: Plan
    mesh: Mesh
    stages: dict[int, Decoder]  # by their number in the whole model, first to last
    weight_gradients: dict[int, WeightGradients]  # gradients put off, by stage, where the schedule splits backward
    gradients: Gradients
    optimizer: Optimizer
    memory: HostMemory  # where offloaded activations wait
    casts: WeightCasts  # weights in 8 bits, if products are
    activity: Activity  # where this rank notes what it is doing
    clock: SectionClock  # how long it works without waiting for others
    load: ExpertLoad
    copies: list[Copies]  # by stage, the copies of its parameters; none where FSDP2 gathers, or precisions are one
    attention: Mapping[Scores, Choice]  # the kernel of every kind of attention
    capture: Capture | None  # captures CUDA graphs of micro-batches; None: there are none
    fused: Fused  # whether products are fused with collectives of tensor parallelism
    pipelines: dict[str, tuple[torch.Size, Runner]] = field(default_factory=dict)  # the latest, by shape of batch
    positions: dict[int, TokenPositions] = field(default_factory=dict)  # the latest of whole sequences, by their length

    @property
    def config(self) -> Config:
        return self.plan.config

    def prepare(self, batch: Micros) -> None:
        """Make the runner of a training step on `batch` where its size is new, which may take seconds."""
        self.training(batch)

    def training(self, batch: Micros) -> Runner:
        """The runner of a training step on `batch`, which is made where its size is new."""
        return self._pipeline("training", batch.shape)

    def evaluation(self, batch: Micros) -> Runner:
        """The runner of a forward pass of `batch`; as `training`."""
        return self._pipeline("evaluation", batch.shape)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by global name. The copies of a tied embedding share a name."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def _pipeline(self, purpose: str, shape: torch.Size) -> Runner:
        if purpose == "training" and self.capture is not None:
            shape = torch.Size((1, *shape[1:]))  # graphs are of one micro-batch, however many a step has
        # The latest is enough: batches only grow, so a shape that is left does not come back.
        if purpose not in self.pipelines or self.pipelines[purpose][0] != shape:
            made = self._for_training(shape) if purpose == "training" else self._for_evaluation(shape)
            self.pipelines[purpose] = shape, made
        return self.pipelines[purpose][1]

    def _for_evaluation(self, shape: torch.Size) -> Runner:
        return build_pipeline(build_forward(self.plan.placement, shape[0]), self, shape, self.activity)

    def _for_training(self, shape: torch.Size) -> Runner:
        table = self.plan.table(shape[0])
        if self.capture is None:
            return build_pipeline(table, self, shape, self.activity, self.clock)
        # Micro-batches are noted, not their actions: those of one table again and again would be no schedule.
        of_one = build_pipeline(table, self, shape, Activity())
        trained = [found.value for every in self.gradients.trained.values() for found in every]
        return GraphedPipeline(of_one, trained, self.copies, self.capture, self.activity, self.clock)


def build_mesh(config: Config, device: torch.device, timeout: timedelta | None = None) -> Mesh | None:
    """The mesh of the ranks, with every group that training by `config` needs; None on ranks outside of the layout.

    Collective over all processes of the job. timeout: of one collective; None: PyTorch's own.
    """
    muon = config.optim.name == "muon"
    return Mesh.build(config.parallel.layout, device, config.parallel.data.sharded, timeout, with_stage=muon)


def build(plan: Plan, mesh: Mesh, activity: Activity | None = None) -> Job:
    """Build this rank's stages with their initial weights, and its optimizer, on a mesh of `build_mesh`.

    activity: where the rank notes what it is doing; None: nobody watches. Raises InputError for kernels that cannot
    run, and where there is no compiler.
    """
    config, memory = plan.config, HostMemory()
    casts = WeightCasts(held=config.parallel.data_mode != "zero3")
    check_kernels(config, mesh.device)
    attention = attention_kernels(config, mesh.device)
    fused = fused_products(config, mesh)
    if config.train.precision == "fp8":
        check_float8(mesh.device, config.train.float8_recipe)
    if config.train.compile:
        check_compiler(mesh.device)
    capture = captures_on(mesh.device) if config.train.cuda_graph else None
    owned = plan.stages_of(mesh.coordinates["pp"])
    stages = {number: build_stage(plan, mesh, number, memory, casts, fused.used) for number in owned}
    splits = plan.table(micro_batches(config)).splits_backward
    put_off = {number: split_backward(stage) for number, stage in stages.items()} if splits else {}
    gradients = Gradients(stages, plan.placement, mesh, config.model.shares_embedding)
    copies = [Copies(stage, compute_dtype(config.train.dtype)) for stage in stages.values()] if plan.copies else []
    optimizer = build_optimizer(
        stages.values(),
        config.model,
        config.optim,
        config.kernels_by_operation,
        mesh.stage,
        copies,
        mesh.device if config.on_host(trained=True) else None,
    )
    activity, clock = activity or Activity(), SectionClock(mesh.device)
    load = ExpertLoad(stages.values(), config.model)
    return Job(
        plan,
        mesh,
        stages,
        put_off,
        gradients,
        optimizer,
        memory,
        casts,
        activity,
        clock,
        load,
        copies,
        attention,
        capture,
        fused,
    )


def check_kernels(config: Config, device: torch.device) -> None:
    """Raises InputError for kernels that tensors on `device` cannot be given to."""
    for operation, backend in asdict(config.kernels_by_operation).items():
        if operation == "attention":  # `attention_kernels` checks it
            continue
        try:
            if backend == "apex":
                apex.check(operation, device)
            else:
                use_triton(backend, device)
        except ValueError as error:
            key = "kernels" if isinstance(config.kernels, str) else f"kernels.{operation}"
            raise InputError(f"{key} = {backend}: {error}") from None


def build_product(config: Config) -> Product:
    """The object that computes matrix products of layers. Raises InputError where it cannot be had."""
    name = config.train.product
    if config.model.four_bits:
        return Plain(compute_dtype(config.train.dtype))
    try:
        return product_of(name)
    except ValueError as error:
        fix = "name an object of an importable module as MODULE:OBJECT, or use plain"
        raise InputError([Problem("train.product", str(error), fix, name)]) from None


def check_compiler(device: torch.device) -> None:
    """Raises InputError where `torch.compile` has no compiler of C++, which it needs for a CPU."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        rule = f"needs a C++ compiler on a CPU, and there is no {compiler}"
        raise InputError([Problem("train.compile", rule, "install one, name one as CXX, or use false", True)])


def build_stage(
    plan: Plan,
    mesh: Mesh,
    number: int,
    memory: HostMemory | None = None,
    casts: WeightCasts | None = None,
    symmetric: bool = False,
) -> Decoder:
    """Stage `number` of the model, sharded and filled.

    memory: where activations wait if they are offloaded; casts: the weights in 8 bits, if products are. The stages of a
    rank share both. symmetric: fuse products with collectives over tp.
    The order matters: compile wraps a layer's forward, recompute the result, since Dynamo leaves a checkpoint alone
    with all that is in it, and FSDP2 both; memory is taken only when every rank knows which part it holds.
    """
    config, last = plan.config, plan.stages - 1
    kernels, layers = config.kernels_by_operation, plan.layers[number]
    buffers = config.parallel.experts.buffers
    stage = Decoder(config.model, mesh.tp, layers, number == 0, number == last, kernels, mesh.ep, buffers)
    use_product(stage.layers, build_product(config))
    if symmetric:
        use_symmetric(stage.layers)
    if config.train.precision == "fp8":
        dtype = compute_dtype(config.train.dtype)
        casts, recipe = casts or WeightCasts(held=False), config.train.float8_recipe
        use_float8(stage.layers, wide_weights(config), dtype, mesh, casts, recipe)
    stage.to(parameter_dtype(config.train.dtype))
    if config.adapter is not None:
        keep_narrow(stage, compute_dtype(config.train.dtype))
    keeping = Offload(memory) if config.train.offload_activations else AsIs
    for layer, mode in zip(stage.layers.values(), plan.modes[number], strict=True):
        divide_stream(cast(Layer, layer), config.train.compile, mode == "full")
        if config.train.compile:
            # A graph for any shape is slower, and a curriculum has few: each has a graph of its own.
            layer.forward = torch.compile(layer.forward, dynamic=False, **compiler_options(symmetric, mesh.device))
        recompute(layer, mode, keeping)
    if plan.fsdp:
        groups, parallel = [(module, mesh.data) for module in stage.gathered_apart()], config.parallel
        if mesh.experts is not None:  # modules before those that they are in
            groups = [*((module, mesh.expert_data) for module in stage.experts()), *groups]
        shard(stage, groups, mesh.data, config.train.dtype, parallel.data_mode, parallel.data.reduce_precision)
    if config.parallel.placement.parameters == "host":
        keep_on_host(stage, mesh.device, config.on_host(trained=True))
    materialize(stage, mesh.device)
    if mesh.device.type != "meta":  # where tensors have no values
        initialize(stage, config.model, config.run.seed)
    seed_dropout(stage, config.run.seed)
    return stage


def compiler_options(symmetric: bool, device: torch.device) -> dict[str, Any]:
    """Arguments of `torch.compile` with which products are fused with collectives; a CPU's compiler cannot."""
    return {"options": {"_micro_pipeline_tp": True}} if symmetric and device.type == "cuda" else {}


def divide_stream(layer: Layer, compiled: bool, recomputed: bool) -> None:
    """Decide in how many tensors `layer` is given the residual stream. recomputed: backward runs all of it again."""
    # Where no norm takes the sum, the compiler may add it in the pass of the norm before.
    layer.in_one = recomputed or (compiled and not layer.before)
    layer.in_two = compiled and not layer.in_one


def keep_narrow(stage: nn.Module, dtype: torch.dtype) -> None:
    """Keep the weights of `stage` that are not trained in the data type of compute."""
    for module in stage.modules():
        for name, param in module.named_parameters(recurse=False):
            if not param.requires_grad and not in_four_bits(param):
                setattr(module, name, nn.Parameter(param.to(dtype), requires_grad=False))


def build_pipeline(
    table: Table, job: Job, shape: torch.Size, activity: Activity, clock: SectionClock | None = None
) -> Pipeline:
    """The runner of `table` for batches of `shape`, `[m, b, s + 1]`. activity: notes its actions. clock: times them."""
    config, mesh = job.config, job.mesh
    _, micro, tokens = shape
    length, samples = ((tokens - 1) * micro, 1) if config.joins_samples else (tokens - 1, micro)
    handed = (length // (mesh.layout.tp * mesh.layout.cp), samples, config.model.width)
    activation = Activation(handed, compute_dtype(config.train.dtype), mesh.device)
    mode = config.parallel.data_mode
    return Pipeline(table, job.stages, job.weight_gradients, mesh, activation, mode, activity, clock)
