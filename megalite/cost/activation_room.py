"""The memory that GPUs leave for activations in a pipeline whose order is searched. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megalite.config.convert import to_plain
from megalite.config.schema import Config
from megalite.plan.automatic import OrderCosts, known_costing, least_of, placement
from megalite.plan.memory.peak import memory_of_ranks
from megalite.plan.memory.total import Total
from megalite.plan.pipeline import as_full, micro_batches
from megalite.plan.resolved import Plan, resolve
from megalite.schedule.generate import SPLIT_SCHEDULES, orders_of
from megalite.schedule.problem import Problem

MAX_TRIES = 4  # orders that are searched for a pipeline, each with less room, until a walk finds that one fits
ROOM_FACTOR = 0.99  # share of the room that a rank gets in the next try, beside what it lacked


def room_for(config: Config, costs: OrderCosts, limit: float) -> tuple[float, ...] | None:
    """By pipeline rank: bytes of activations with which the order of `auto` keeps within `limit` bytes of a GPU.

    None where that is not known: no named schedule has the placement and whole backward passes, if they must be whole;
    or no order that was tried fits.
    """
    text = json.dumps(to_plain(config), sort_keys=True)
    return _found(_Asked(text, config), costs, limit)


@dataclass(frozen=True)
class _Asked:
    """A configuration that can be looked up."""

    text: str
    config: Config = field(compare=False)


@lru_cache(maxsize=512)  # a walk takes up to seconds, and commands ask for the same one several times
def _found(asked: _Asked, costs: OrderCosts, limit: float) -> tuple[float, ...] | None:
    config, m = asked.config, micro_batches(asked.config)
    named = _named(config)
    if named is None:
        return None
    few = as_full(named, m)
    _, orders = orders_of(named.parallel.pipeline.schedule, config.parallel.pp, few)
    problem = Problem(placement(config), few, costs.stages, (), 0.0, False)
    whole = [memory.total for memory in memory_of_ranks(named)]
    room, least = room_beside(whole, problem.peaks(problem.coded(orders)), limit), least_of(config)
    for _ in range(MAX_TRIES):
        if any(have < need for have, need in zip(room, least, strict=True)):
            return None
        tried = replace(costs, room=room)
        memory = memory_under(resolve(config, costing=known_costing(tried)), m)
        if max(memory) <= limit:
            return room
        room = tightened(room, memory, limit)
    return None


def _named(config: Config) -> Config | None:
    """`config` with a named schedule that places stages as `auto` does; None if none can run."""
    name = "1f1b" if config.parallel.pipeline.stages_per_rank == 1 else "zbv"
    if config.train.compile and name in SPLIT_SCHEDULES:
        return None
    pipeline = replace(config.parallel.pipeline, schedule=name, memory=None)
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline))


def room_beside(whole: Sequence[float], counted: Sequence[float], limit: float) -> tuple[float, ...]:
    """By rank: bytes of activations that `limit` leaves, if all else takes as much as under a known order.

    whole: what a walk finds under that order. counted: of this, the activations as a search counts them.
    """
    return tuple(limit - (size - part) for size, part in zip(whole, counted, strict=True))


def memory_under(plan: Plan, m: int) -> list[int]:
    """Bytes of every pipeline rank in a step of `m` micro-batches, whose order is walked through as a whole."""
    inputs = m * plan.sizes.inputs
    return [Total(plan, m, pp).most_bytes() + inputs for pp in range(plan.config.parallel.pp)]


def tightened(room: Sequence[float], memory: Sequence[float], limit: float) -> tuple[float, ...]:
    """Less room for those ranks whose `memory` was more than the limit."""
    over = (size - limit for size in memory)
    return tuple(ROOM_FACTOR * (have - more) if more > 0 else have for have, more in zip(room, over, strict=True))
