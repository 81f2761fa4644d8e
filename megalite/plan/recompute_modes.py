"""Recompute mode of each layer: whether, and how, it recomputes its activations in backward.

none       keep everything that backward needs
selective  keep results of matrix products, attention and collectives; recompute cheap operations
full       keep the layer's input; run the layer again
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Literal, TypeVar

from megalite.base.errors import InputError, Problem
from megalite.base.terminal import gib_above
from megalite.config.schema import Train
from megalite.plan.model.size import by_stage
from megalite.schedule.actions import Action, Table
from megalite.schedule.simulate import LIVE_CHANGES
from megalite_launch.base.texts import memory_text

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
FORWARD_PASSES: dict[Mode, float] = {"none": 3.0, "selective": 3.1, "full": 4.0}  # layer's time in forward passes
GIB = 1 << 30
T = TypeVar("T")


@dataclass(frozen=True)
class ModeCost:
    """Time and memory of one layer for one micro-batch, in one mode."""

    seconds: float  # time of forward and backward
    bytes: int  # kept from forward to backward


Costs = Mapping[Mode, ModeCost]  # costs of one layer


def every_nth(mode: Mode, n: int, layers: int) -> list[Mode]:
    """`mode` for layers 0, n, 2n, … of a stage, none for the others."""
    return [mode if layer % n == 0 else "none" for layer in range(layers)]


def in_flight(table: Table, rank: int) -> dict[int, int]:
    """By stage of a rank: the most micro-batches whose activations it holds at once."""
    now, most = Counter[int](), dict.fromkeys(table.stages_of(rank), 0)
    for item in table.programs[rank]:
        if isinstance(item, Action) and item.kind in LIVE_CHANGES:
            now[item.stage] += LIVE_CHANGES[item.kind]
            most[item.stage] = max(most[item.stage], now[item.stage])
    return most


def most_in_flight(tables: Sequence[Table], rank: int) -> dict[int, int]:
    """By stage of a rank: the largest `in_flight` of several steps."""
    each = [in_flight(table, rank) for table in tables]
    return {stage: max(counts[stage] for counts in each) for stage in each[0]}


def held_by_rank(tables: Sequence[Table], split: Sequence[int]) -> list[list[int]]:
    """By pipeline rank: for each layer, stage by stage, the most micro-batches in flight at once in any step.

    split: layers per stage.
    """
    return [
        [count for stage, count in most_in_flight(tables, rank).items() for _ in range(split[stage])]
        for rank in range(tables[0].ranks)
    ]


def by_rank(table: Table, split: Sequence[int], values: Sequence[T]) -> list[list[T]]:
    """By pipeline rank: the values of its layers, stage by stage. values: one for each layer of the model."""
    of_stages = by_stage(values, split)
    return [[value for stage in table.stages_of(rank) for value in of_stages[stage]] for rank in range(table.ranks)]


def kept_by_rank(tables: Sequence[Table], outside: Mapping[int, int]) -> list[int]:
    """By pipeline rank: the bytes that its stages keep outside of their layers when they hold the most micro-batches.

    outside: by stage, the bytes for one micro-batch.
    """
    return [
        sum(count * outside.get(stage, 0) for stage, count in most_in_flight(tables, rank).items())
        for rank in range(tables[0].ranks)
    ]


def choose(costs: Sequence[Costs], held: Sequence[int], limit: int) -> list[Mode] | None:
    """The fastest modes of a rank's layers that keep at most `limit` bytes; None if no modes keep so little.

    costs: of each layer. held: for each layer, how many micro-batches are in flight at once. If layers differ in their
    costs, slightly faster modes may exist.
    """
    if all(cost == costs[0] for cost in costs):
        return _choose_alike(costs[0], held, limit) if costs else []
    return _choose_mixed(costs, held, limit)


def _choose_alike(costs: Costs, held: Sequence[int], limit: int) -> list[Mode] | None:
    """`choose` for layers that all cost the same.

    Time depends only on how many layers have each mode. Bytes are fewest if the layers with the most micro-batches in
    flight get the leanest mode.
    """
    order = sorted(range(len(held)), key=lambda layer: -held[layer])
    upto = list(accumulate((held[layer] for layer in order), initial=0))
    leanest = sorted(costs, key=lambda mode: costs[mode].bytes)

    def cost(first: int, second: int) -> tuple[float, int]:
        """Time and bytes, with the leanest mode for layers up to `first`, the next for those up to `second`."""
        counts = [first, second - first, len(held) - second]
        weights = [upto[first], upto[second] - upto[first], upto[-1] - upto[second]]
        seconds = math.fsum(count * costs[mode].seconds for count, mode in zip(counts, leanest, strict=True))
        return seconds, sum(weight * costs[mode].bytes for weight, mode in zip(weights, leanest, strict=True))

    found: list[tuple[tuple[float, int], int, int]] = []
    for first in range(len(held) + 1):
        seconds = range(first, len(held) + 1)
        # Time is linear in `second`, and a larger `second` keeps less: the best is at one end of the range that fits.
        fitting = seconds[bisect_left(seconds, True, key=lambda second: cost(first, second)[1] <= limit) :]
        found += [(cost(first, second), first, second) for second in {*fitting[:1], *fitting[-1:]}]
    if not found:
        return None
    _, first, second = min(found)
    chosen = [leanest[(at >= first) + (at >= second)] for at in range(len(held))]
    return [mode for _, mode in sorted(zip(order, chosen, strict=True))]


def _choose_mixed(costs: Sequence[Costs], held: Sequence[int], limit: int) -> list[Mode] | None:
    """`choose` for layers that differ: change the mode that costs the least time per byte saved, until everything fits.

    This is the greedy algorithm for the multiple-choice knapsack problem (Sinha and Zoltners 1979, Oper. Res. 27(3)).
    No other choice that keeps as few bytes is faster.
    """
    chosen = [min(cost, key=lambda mode: (cost[mode].seconds, cost[mode].bytes)) for cost in costs]
    kept = sum(count * cost[mode].bytes for cost, mode, count in zip(costs, chosen, held, strict=True))
    while kept > limit:
        steps = [
            ((cost[mode].seconds - cost[now].seconds) / saved, layer, mode, saved)
            for layer, (cost, now, count) in enumerate(zip(costs, chosen, held, strict=True))
            for mode in cost
            if (saved := count * (cost[now].bytes - cost[mode].bytes)) > 0
        ]
        if not steps:
            return None
        _, layer, chosen[layer], saved = min(steps)
        kept -= saved
    return chosen


def choose_for_all(
    costs: Sequence[Sequence[Costs]], held: Sequence[Sequence[int]], outside: Sequence[int], budget: float
) -> list[list[Mode]]:
    """`choose` for every pipeline rank. budget: `train.recompute_budget`, in GiB.

    costs, held: by pipeline rank, for each of its layers. outside: by pipeline rank, bytes that are kept outside of
    layers. Raises InputError, the same on every rank, if some rank's activations do not fit.
    """
    limits = [round(budget * GIB) - kept for kept in outside]
    chosen = [choose(*rank) for rank in zip(costs, held, limits, strict=True)]
    found = [modes for modes in chosen if modes is not None]
    if len(found) < len(chosen):
        kept = max(map(_least, costs, held, outside))
        rule = f"the activations of a rank take {memory_text(kept)} even when every layer keeps as little as it can"
        fix = f"use at least {gib_above(kept)}, a smaller batch.micro, or more tensor or context parallelism"
        raise InputError([Problem("train.recompute_budget", rule, fix, budget)])
    return found


def _least(costs: Sequence[Costs], held: Sequence[int], outside: int) -> int:
    """Bytes that a rank keeps when every layer keeps as little as it can."""
    return outside + sum(count * min(cost.bytes for cost in of.values()) for of, count in zip(costs, held, strict=True))


def modes_by_stage(
    train: Train,
    tables: Callable[[], Sequence[Table]],
    split: Sequence[int],
    outside: Callable[[], Mapping[int, int]],
    costs: Callable[[], Sequence[Costs]],
) -> dict[int, list[Mode]]:
    """By stage of the whole pipeline: the mode of each layer. Functions are called only if a budget is set.

    tables: schedules of the steps that hold most. split: layers per stage. outside: by stage, bytes that a micro-batch
    keeps outside of layers. costs: of every layer of the model. Raises InputError for a budget that no modes fit.
    """
    if train.recompute != "budget":
        return {stage: every_nth(train.recompute, train.recompute_every, count) for stage, count in enumerate(split)}
    assert train.recompute_budget is not None, "validation asks for it"
    steps = tables()
    held, kept = held_by_rank(steps, split), kept_by_rank(steps, outside())
    chosen = choose_for_all(by_rank(steps[0], split, costs()), held, kept, train.recompute_budget)
    found: dict[int, list[Mode]] = {}
    for rank, modes in enumerate(chosen):
        layers = iter(modes)
        found |= {stage: list(islice(layers, split[stage])) for stage in steps[0].stages_of(rank)}
    return found
