"""Costs of stages and memory of ranks, for which `parallel.pipeline.schedule: auto` searches an order.

Where the cluster is known, the planner gives the times of stages and of exchanges beside them: it stands above
this package, so its `Costing` is handed in. Otherwise times follow from FLOPs. Per token, with M those of a layer's
matrices and S those of its attention scores and values:

    F       M + S
    I       M + 2S, and what recompute runs again
    W       M
    B       I + W
    head    M in F and 2M in I, none in W; with logits in chunks, all 3M in F

Transfers count as free then. In both cases memory is what `plan.activations` says that stages keep of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Protocol

from megalite.base.errors import InputError, Problem
from megalite.base.terminal import gib_above
from megalite.config.layers import LayerKind, layer_kinds
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.plan.activations import Activations
from megalite.plan.model.size import (
    by_stage,
    head_forward_flops,
    head_weight_flops,
    layer_forward_flops,
    layer_matrix_flops,
    layer_weight_flops,
)
from megalite.plan.recompute_modes import FORWARD_PASSES, GIB, Mode, every_nth
from megalite.plan.repeated_layers import parts_of
from megalite.plan.split import split_of
from megalite.schedule.actions import Table
from megalite.schedule.communication import communicate
from megalite.schedule.generate import AUTO_SCHEDULE, placement_of
from megalite.schedule.problem import Beside, StageCosts
from megalite.schedule.search import FoundOrder, least_memory, search
from megalite.schedule.simulate import COLUMN
from megalite_launch.base.texts import memory_text

Flops = tuple[float, float, float]  # per token, of F, I and W
GRAIN = 1024  # times are whole multiples of 1/1024, so floats add them up exactly and equal moments are found equal


@dataclass(frozen=True)
class OrderCosts:
    """Costs of the stages of a pipeline, for one micro-batch.

    stages: their times, in any unit, and the bytes that they keep. cluster: whose times these are; None: those of
    FLOPs. transfer: until a result is on another rank. beside: what runs beside compute; None: nothing. room: by
    pipeline rank, bytes of activations that fit into memory; None: not known.
    """

    stages: tuple[StageCosts, ...]
    cluster: str | None = None
    transfer: float = 0.0
    beside: Beside | None = None
    room: tuple[float, ...] | None = None


class Costing(Protocol):
    """Gives the costs of a configuration with numbers as `parallel.dp_shard` and `batch.micro`."""

    def __call__(self, config: Config, *, with_room: bool = True) -> OrderCosts:
        """Return the costs. with_room: False where the room is not asked for, as it takes a while to find."""


def known_costing(costs: OrderCosts) -> Costing:
    """Return a costing for one configuration, whose costs are known."""

    def costing(config: Config, *, with_room: bool = True) -> OrderCosts:
        return costs

    return costing


@dataclass(frozen=True)
class Wanted:
    """Problem that a search for an order solves. Configurations with equal problems get the same order."""

    placement: tuple[int, ...]  # stage -> the pipeline rank that owns it
    m: int
    costs: OrderCosts
    limits: tuple[float, ...]  # by rank: bytes of activations
    splits: bool  # backward may be split


def wanted(config: Config, m: int, costing: Costing | None = None) -> Wanted:
    """Problem of a step of `m` micro-batches. Raises InputError where not even one fits `parallel.pipeline.memory`.

    costing: None for times by FLOPs, which is for configurations that name no cluster.
    """
    check_limit(config)
    if costing is None and config.run.cluster is not None:
        raise ValueError("a configuration with run.cluster needs the costing of planner.ordering")
    costs = OrderCosts(tuple(costs_of(config))) if costing is None else costing(config)
    if config.parallel.pipeline.memory is None and costs.room is not None:
        limits = costs.room
    else:
        limits = (limit_of(config, m),) * config.parallel.pp
    return Wanted(placement(config), m, costs, limits, not config.train.compile)


@lru_cache(maxsize=512)  # a search takes up to seconds, and commands ask for the same one several times
def found(wanted: Wanted) -> FoundOrder:
    """The result of the search."""
    of, costs = wanted, wanted.costs
    return search(of.placement, of.m, costs.stages, of.limits, costs.transfer, of.splits, costs.beside)


def build(wanted: Wanted) -> Table:
    """The order that is found, with its transfers."""
    order, times = found(wanted), tuple(stage.times for stage in wanted.costs.stages)
    name = AUTO_SCHEDULE if order.name == AUTO_SCHEDULE else f"{AUTO_SCHEDULE} ({order.name})"
    return Table(name, wanted.m, wanted.placement, communicate(order.orders, wanted.placement, times), times)


def idle(wanted: Wanted) -> float:
    """The share of a step in which ranks compute nothing under the order that is found."""
    order, stages = found(wanted), wanted.costs.stages
    busy = sum(stages[action.stage].times[COLUMN[action.kind]] for each in order.orders for action in each)
    return 1 - busy / (len(order.orders) * order.makespan)


def check_limit(config: Config) -> None:
    """Raises InputError if `parallel.pipeline.memory` is less than one micro-batch takes."""
    memory = config.parallel.pipeline.memory
    if memory is None:
        return
    least = least_of(config)
    if max(least) > memory * GIB:
        rule = (
            f"is less than the {memory_text(max(least))} of activations of one micro-batch on pipeline rank "
            f"{least.index(max(least))}"
        )
        fix = f"use at least {gib_above(max(least))}, null, a smaller batch.micro, or train.recompute=selective or full"
        raise InputError([Problem("parallel.pipeline.memory", rule, fix, memory)])


def limit_of(config: Config, m: int) -> float:
    """Bytes of activations that a rank may hold: as configured, or else as much as 1f1b holds on its fullest rank.

    With two stages on a rank, 1f1b is that on half as many stages, each of two neighbours. Where even one micro-batch
    takes more in the V, so much is allowed.
    """
    memory, p = config.parallel.pipeline.memory, config.parallel.pp
    if memory is not None:
        return memory * GIB
    costs, v = costs_of(config), config.parallel.pipeline.stages_per_rank
    kept = [sum(stage.kept for stage in costs[v * rank : v * (rank + 1)]) for rank in range(p)]
    return max(*(min(m, p - rank) * size for rank, size in enumerate(kept)), *least_of(config))


def least_of(config: Config) -> list[float]:
    """By pipeline rank: the bytes of activations with which it can still run, those of one micro-batch."""
    return least_memory(placement(config), costs_of(config))


def as_tight(config: Config, small: Config) -> float:
    """The `parallel.pipeline.memory` of `small`, in GiB, that limits its order as that of `config` does there.

    It is the same share of what 1f1b holds, and at least what one micro-batch takes.
    """

    def of_1f1b(config: Config) -> float:
        pipeline = replace(config.parallel.pipeline, memory=None)
        config = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        return limit_of(config, config.batch.global_ // (config.batch.micro_size * config.parallel.layout.dp)) / GIB

    assert config.parallel.pipeline.memory is not None
    least = max(least_of(small)) / GIB
    return max(least, config.parallel.pipeline.memory * of_1f1b(small) / of_1f1b(config))


def costs_of(config: Config) -> list[StageCosts]:
    """By stage: the times of its actions by FLOPs, in forwards of an average stage, and the bytes that it keeps.

    With `train.recompute: budget`, layers count as if they recomputed nothing: what they do follows from the order.
    """
    train, split, kinds = config.train, split_of(config), layer_kinds(config.model)
    recompute: Mode = "none" if train.recompute == "budget" else train.recompute
    modes = [every_nth(recompute, train.recompute_every, count) for count in split]
    layers = {stage: list(zip(own, modes[stage], strict=True)) for stage, own in enumerate(by_stage(kinds, split))}
    sizes = Activations(config)
    one = cache(partial(_layer_flops, config.model))
    times = [_flops([one(*layer) for layer in layers[stage]]) for stage in layers]
    times[-1] = _with_head(times[-1], config.model, sizes.chunks_head)
    unit = sum(forward for forward, _, _ in times) / len(times)
    found = []
    for stage, parts in parts_of(sizes, layers, len(split)).items():
        forward, back, weight = (round(GRAIN * flops / unit) / GRAIN for flops in times[stage])
        forward, back = max(forward, 1 / GRAIN), max(back, 1 / GRAIN)  # no result is sent when its input arrives
        kept = sum(kept.bytes for part in parts for kept in part.kept) + sizes.turns
        waiting = sum(held.total() for part in parts if part.puts_off for held in part.retained.values())
        found.append(StageCosts(forward, back + weight, back, weight, kept, waiting))
    return found


def _layer_flops(model: Model, kind: LayerKind, mode: Mode) -> Flops:
    """FLOPs per token of F, I and W in a layer."""
    whole, matrices = layer_forward_flops(model, kind), layer_matrix_flops(model, kind)
    again = (FORWARD_PASSES[mode] - FORWARD_PASSES["none"]) * whole
    return whole, matrices + 2 * (whole - matrices) + again, layer_weight_flops(model, kind)


def _flops(layers: Sequence[Flops]) -> Flops:
    """FLOPs of a stage's layers together."""
    forward, back, weight = (sum(column) for column in zip(*layers, strict=True)) if layers else (0.0, 0.0, 0.0)
    return forward, back, weight


def _with_head(stage: Flops, model: Model, chunks: bool) -> Flops:
    """FLOPs of the last stage, with those of the head. chunks: the head makes its gradients in F, chunk by chunk."""
    forward, back, weight = stage
    head = head_forward_flops(model)
    gradients = head + head_weight_flops(model)
    return (forward + head + gradients, back, weight) if chunks else (forward + head, back + gradients, weight)


def placement(config: Config) -> tuple[int, ...]:
    """By stage, the pipeline rank that owns it."""
    pipeline = config.parallel.pipeline
    return placement_of(AUTO_SCHEDULE, config.parallel.pp, pipeline.stages_per_rank)
