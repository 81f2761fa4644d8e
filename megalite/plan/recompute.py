"""Which layers recompute their activations in backward, and how.

none       keep everything that backward needs
selective  keep results of matrix products, attention and collectives; make the cheap ones again
full       keep the layer's input; run the layer again
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Literal

from megalite.config.errors import InputError, Problem
from megalite.config.schema import Train
from megalite.schedule.actions import Action, Table
from megalite.schedule.simulate import LIVE

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
GIB = 1 << 30


@dataclass(frozen=True)
class Cost:
    """Of one layer and one micro-batch."""

    seconds: float  # of forward and backward
    bytes: int  # kept from forward to backward


def every_nth(mode: Mode, n: int, layers: int) -> list[Mode]:
    """`mode` for layers 0, n, 2n, … of a stage, none for the others."""
    return [mode if layer % n == 0 else "none" for layer in range(layers)]


def in_flight(table: Table, rank: int) -> dict[int, int]:
    """By stage of a rank: the most micro-batches whose activations it holds at once."""
    program = [item for item in table.programs[rank] if isinstance(item, Action)]
    return {
        stage: max(accumulate((LIVE.get(a.kind, 0) for a in program if a.stage == stage), initial=0))
        for stage in table.stages_of(rank)
    }


def held_by_rank(table: Table, split: Sequence[int]) -> list[list[int]]:
    """By pipeline rank: of each of its layers, stage by stage, the most micro-batches in flight at once.

    split: layers per stage.
    """
    return [
        [count for stage, count in in_flight(table, rank).items() for _ in range(split[stage])]
        for rank in range(table.ranks)
    ]


def choose(costs: Mapping[Mode, Cost], held: Sequence[int], limit: int) -> list[Mode] | None:
    """The modes of a rank's layers that take the least time and keep at most `limit` bytes; None if none do.

    held: of each layer, how many micro-batches are in flight at once. All layers cost the same, so only the number
    of each mode counts for time, and for bytes it is best to give the leanest mode to the layers that hold most.
    """
    order = sorted(range(len(held)), key=lambda layer: -held[layer])
    upto = list(accumulate((held[layer] for layer in order), initial=0))
    leanest = sorted(costs, key=lambda mode: costs[mode].bytes)
    best: tuple[float, int, list[Mode]] | None = None
    for first in range(len(held) + 1):
        for second in range(first, len(held) + 1):
            counts = [first, second - first, len(held) - second]
            weights = [upto[first], upto[second] - upto[first], upto[-1] - upto[second]]
            seconds = math.fsum(count * costs[mode].seconds for count, mode in zip(counts, leanest, strict=True))
            kept = sum(weight * costs[mode].bytes for weight, mode in zip(weights, leanest, strict=True))
            if kept <= limit and (best is None or (seconds, kept) < best[:2]):
                modes = [mode for count, mode in zip(counts, leanest, strict=True) for _ in range(count)]
                best = seconds, kept, [mode for _, mode in sorted(zip(order, modes, strict=True))]
    return best and best[2]


def choose_for_all(costs: Mapping[Mode, Cost], held: Sequence[Sequence[int]], budget: float) -> list[list[Mode]]:
    """`choose` for every pipeline rank, with `train.recompute_budget` in GiB.

    held: by pipeline rank, of each of its layers. Raises InputError, the same on every rank, if some rank's layers
    do not fit.
    """
    chosen = [choose(costs, layers, round(budget * GIB)) for layers in held]
    found = [modes for modes in chosen if modes is not None]
    if len(found) < len(chosen):
        least = min(cost.bytes for cost in costs.values())
        needed = math.ceil(1000 * max(least * sum(layers) for layers in held) / GIB) / 1000
        rule = f"the activations of a rank take {needed} GiB even when every layer keeps as little as it can"
        fix = f"use at least {needed}, a smaller batch.micro, or more tensor or context parallelism"
        raise InputError([Problem("train.recompute_budget", rule, fix, budget)])
    return found


def modes_by_stage(
    train: Train, table: Table, split: Sequence[int], rank: int, costs: Callable[[], Mapping[Mode, Cost]]
) -> dict[int, list[Mode]]:
    """By stage of a pipeline rank: the mode of each of its layers. `costs` are asked for where a budget is set.

    split: layers per stage. Raises InputError for a budget that nothing fits.
    """
    stages = table.stages_of(rank)
    if train.recompute != "budget":
        return {stage: every_nth(train.recompute, train.recompute_every, split[stage]) for stage in stages}
    assert train.recompute_budget is not None, "validation asks for it"
    layers = iter(choose_for_all(costs(), held_by_rank(table, split), train.recompute_budget)[rank])
    return {stage: list(islice(layers, split[stage])) for stage in stages}
