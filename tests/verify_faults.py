"""Faults planted in the parallel code, to see that `megalite verify` finds them.

Each is a context in which one function is replaced. The single process that a layout is compared with is
global rank 0 in a mesh of one rank; so a fault touches only larger groups, or only rank 1.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megalite.commands import verify
from megalite.commands.verify import Difference, compare
from megalite.config.schema import Config
from megalite.distributed import collectives
from megalite.distributed.mesh import Mesh
from megalite.model import router
from megalite.model.router import Router
from megalite.optim import muon
from megalite.optim.muon import Muon
from megalite.optim.newton_schulz import scale
from megalite.optim.scratch_file import ScratchFile
from megalite.parallel import gradients, linear, recompute, tensor
from megalite.parallel.dropout import Dropout
from megalite.parallel.gradients import Gradients
from megalite.parallel.parameter import parameters
from megalite.parallel.pipeline import Pipeline
from megalite.plan.recompute_modes import MODES, Costs
from megalite.schedule.actions import Kind
from megalite.train import build, recompute_costs, step
from megalite.train.recompute_costs import measured_costs, plan_for

Fault = Callable[[], AbstractContextManager[Any]]


def reduce_scatter_that_does_not_sum() -> AbstractContextManager[Any]:
    def own_slice(x: Tensor, group: dist.ProcessGroup) -> collectives.Pending:
        return collectives.Pending(x.chunk(group.size())[group.rank()].clone(), None)

    return patch.object(collectives, "start_reduce_scatter", own_slice)


def gather_in_the_wrong_order() -> AbstractContextManager[Any]:
    correct = collectives.start_gather

    def reversed_parts(x: Tensor, group: dist.ProcessGroup) -> collectives.Pending:
        return collectives.Pending(torch.cat(correct(x, group).wait().chunk(group.size())[::-1]), None)

    return patch.object(linear, "start_gather", reversed_parts)


def tied_gradients_not_summed() -> AbstractContextManager[Any]:
    return patch.object(Gradients, "_sum_of_ends", lambda gradients, grad: None)


def partial_gradients_taken_for_whole() -> AbstractContextManager[Any]:
    return patch.object(gradients, "sum_together", lambda *_: None)


def gradients_averaged() -> AbstractContextManager[Any]:
    return patch.multiple(
        FSDPModule,
        set_gradient_divide_factor=lambda module, factor: None,
        set_force_sum_reduction_for_comms=lambda module, enable: None,
    )


def micro_batch_sent_twice() -> AbstractContextManager[Any]:
    """Micro-batch 1 carries the activations of micro-batch 0."""
    correct, kept = Pipeline._forward, {}

    def forward(pipeline: Pipeline, action: Any, step: Any, flight: Any) -> Any:
        result = correct(pipeline, action, step, flight)
        if action.stage == 0 and action.send in flight.outbox:
            kept[action.micro] = flight.outbox[action.send]
            flight.outbox[action.send] = kept[0]
        return result

    return patch.object(Pipeline, "_forward", forward)


def last_micro_batch_without_backward() -> AbstractContextManager[Any]:
    correct = Pipeline._backward

    def backward(pipeline: Pipeline, action: Any, flight: Any) -> None:
        if action.micro == pipeline.table.micro_batches - 1 and action.stage == pipeline.table.stages - 1 > 0:
            forward = action._replace(kind=Kind.F)
            flight.outbox[action.send] = torch.zeros_like(flight.inputs.pop(forward))
            flight.outputs.pop(forward)
        else:
            correct(pipeline, action, flight)

    return patch.object(Pipeline, "_backward", backward)


def replicas_counted_in_the_norm() -> AbstractContextManager[Any]:
    return patch.object(gradients, "counts", lambda param: True)


def seed_that_depends_on_the_rank() -> AbstractContextManager[Any]:
    correct = build.initialize

    def initialize(stage: Any, model: Any, seed: int) -> None:
        correct(stage, model, seed + (dist.get_rank() == 1))

    return patch.object(build, "initialize", initialize)


def factors_that_begin_by_their_part() -> AbstractContextManager[Any]:
    """First factors begin with the deviation of the part that a rank of tp has."""
    correct = build.initialize

    def initialize(stage: Any, model: Any, seed: int) -> None:
        correct(stage, model, seed)
        for found in parameters(stage):
            if found.name.endswith("lora_a.weight"):
                found.value._local_tensor.mul_(found.value.device_mesh.size() ** 0.5)

    return patch.object(build, "initialize", initialize)


def second_factors_summed_once_more() -> AbstractContextManager[Any]:
    """Where tp sums what a matrix makes, every rank adds what the adapter does before that."""
    correct = tensor.second_factor

    def second_factor(layer: Any, between: Tensor, scale: float, *others: Any) -> Tensor:
        ranks = layer.group.size() if isinstance(layer, tensor.RowLinear) else 1
        return correct(layer, between, scale * ranks, *others)

    return patch.object(tensor, "second_factor", second_factor)


def features_dropped_by_place_on_the_rank() -> AbstractContextManager[Any]:
    correct = Dropout.__call__
    return patch.object(Dropout, "__call__", lambda dropout, x: correct(replace(dropout, rank=0), x))


def base_that_is_trained() -> AbstractContextManager[Any]:
    """The layout decays weights that are not trained."""
    correct = verify.update

    def update(job: Any, *others: Any) -> Any:
        made = correct(job, *others)
        for _, param in job.named_parameters() if job.mesh.layout.world_size > 1 else ():
            if not param.requires_grad:
                param._local_tensor.mul_(1 - 1e-6)
        return made

    return patch.object(verify, "update", update)


def _trained(gradients: Gradients) -> list[tuple[str, Any]]:
    return [(found.name, found.value) for every in gradients.trained.values() for found in every]


def gradient_of_a_useless_bias() -> AbstractContextManager[Any]:
    """It is 0 but for roundings, and in a layout of more ranks a ten-millionth."""
    correct = Gradients.finish

    def finish(gradients: Gradients) -> None:
        correct(gradients)
        for name, param in _trained(gradients) if dist.get_world_size(gradients._mesh.world) > 1 else ():
            if name.endswith("k.bias"):
                param.grad.to_local().add_(1e-7)

    return patch.object(Gradients, "finish", finish)


def no_gradient_at_all() -> AbstractContextManager[Any]:
    """Neither in the layout nor in the process that it is compared with."""
    correct = Gradients.finish

    def finish(gradients: Gradients) -> None:
        correct(gradients)
        for _, param in _trained(gradients):
            param.grad.zero_()

    return patch.object(Gradients, "finish", finish)


def muon_scale_of_a_shard() -> AbstractContextManager[Any]:
    """The shape of the part that a rank holds, in place of that of the matrix."""
    correct = Muon._apply

    def apply(optimizer: Muon, updates: Any, targets: Any) -> None:
        for index, parts in updates.items():
            shape = targets[index].part(targets[index].param).shape
            with patch.object(muon, "scale", lambda rule, *whole, shape=shape: scale(rule, *shape)):
                correct(optimizer, {index: parts}, targets)

    return patch.object(Muon, "_apply", apply)


def rank_that_does_not_clip() -> AbstractContextManager[Any]:
    correct = step.clip_coefficient

    def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
        return correct(norm, inf if dist.get_rank() == 1 else limit)

    return patch.object(step, "clip_coefficient", clip_coefficient)


def loss_of_one_rank_not_counted() -> AbstractContextManager[Any]:
    correct = Pipeline.run

    def run(pipeline: Pipeline, step: Any) -> Tensor:
        return correct(pipeline, step) * (dist.get_rank() != 1)

    return patch.object(Pipeline, "run", run)


def gradient_that_is_not_a_number() -> AbstractContextManager[Any]:
    correct = Gradients.finish

    def finish(gradients: Gradients) -> None:
        correct(gradients)
        if dist.get_rank() == 1:
            _, first = _trained(gradients)[0]
            first.grad.to_local().fill_(torch.nan)

    return patch.object(Gradients, "finish", finish)


def scale_of_a_full_batch() -> AbstractContextManager[Any]:
    """Where batches grow, the first ones are smaller."""
    correct = step.target_tokens

    def target_tokens(job: Any, batch: Any) -> int:
        if job.mesh.layout.world_size == 1:
            return correct(job, batch)
        return job.config.batch.global_ * job.config.model.sequence_length

    return patch.object(step, "target_tokens", target_tokens)


def _routers(choose: Callable[..., Tensor]) -> AbstractContextManager[Any]:
    """Routers whose experts are `choose(correct, logits)`; `correct` takes logits."""
    of_router = Router._chosen

    def chosen(router: Router, logits: Tensor, *others: Any) -> tuple[Tensor, ...]:
        rest: tuple[Any, ...] = ()

        def correct(logits: Tensor) -> Tensor:
            nonlocal rest
            experts, *rest = of_router(router, logits, *others)
            return experts

        return (choose(correct, logits).contiguous(), *rest)

    return patch.object(Router, "_chosen", chosen)


def ties_to_the_higher_number() -> AbstractContextManager[Any]:
    """On rank 1; logits are so coarse that many are equal."""

    def choose(correct: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
        coarse = logits.round(decimals=1)
        return correct(coarse) if dist.get_rank() != 1 else logits.shape[-1] - 1 - correct(coarse.flip(-1))

    return _routers(choose)


def experts_of_the_token_before() -> AbstractContextManager[Any]:
    """On rank 1."""
    return _routers(lambda correct, logits: correct(logits).roll(int(dist.get_rank() == 1), 0))


def experts_in_another_order() -> AbstractContextManager[Any]:
    """On rank 1, from the last of a token's to the first."""
    return _routers(lambda correct, logits: correct(logits).flip(-1) if dist.get_rank() == 1 else correct(logits))


def one_choice_that_differs() -> AbstractContextManager[Any]:
    """Of rank 1, for the last token of every micro-batch: its worst expert in place of its best."""

    def choose(correct: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
        experts = correct(logits)
        if dist.get_rank() == 1:
            experts[-1, -1, 0] = logits[-1, -1].argmin()
        return experts

    return _routers(choose)


def recompute_that_chooses_again() -> AbstractContextManager[Any]:
    """And other experts than forward did: those of the last token for the first, and so on."""
    correct = recompute.remembered

    def remembered(make: Callable[[], Any]) -> Any:
        made, memory = correct(make), recompute._running.memory
        if memory is None or not memory.again:
            return made
        experts, *rest = made
        return experts.flip(0), *rest

    return patch.object(router, "remembered", remembered)


def modes_in_use(config: Config) -> set[str]:
    """What layers of any rank recompute in backward, where times are in the order of what is recomputed."""

    def costs(config: Config, mesh: Mesh) -> list[Costs]:  # as measured, layers as small differ by chance
        measured = measured_costs(config, mesh)
        return [{mode: replace(cost[mode], seconds=MODES.index(mode)) for mode in MODES} for cost in measured]

    mesh = Mesh.build(config.parallel.layout, torch.device("cpu"), config.parallel.data.sharded)
    with patch.object(recompute_costs, "measured_costs", costs):
        return set() if mesh is None else {mode for modes in plan_for(config, mesh).modes.values() for mode in modes}


def compare_with(fault: Fault, config: Config, steps: int = 3) -> list[Difference]:
    """What `verify` says of `config` while `fault` is planted on every rank."""
    with fault():
        return compare(config, steps, 1e-10)


def norm_kernel_that_forgets_epsilon() -> AbstractContextManager[Any]:
    module = importlib.import_module("megalite_kernels.rms_norm")  # the package has the function by this name
    correct = module.launch_forward
    return patch.object(module, "launch_forward", lambda x, add, weight, eps: correct(x, add, weight, 0.0))


def states_that_are_not_written() -> AbstractContextManager[Any]:
    return patch.object(ScratchFile, "write", lambda file, buffer, target: None)
