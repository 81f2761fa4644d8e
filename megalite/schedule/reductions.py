"""Moments at which data-parallel ranks reduce gradients. The runner follows this, the memory prediction counts it."""

from collections import Counter
from dataclasses import dataclass

from megalite.schedule.actions import Action, Kind, Table


@dataclass(frozen=True)
class Reduction:
    """Treatment of the gradients of a stage at the end of one of its backward actions."""

    now: bool = False  # they are reduced over the shards; else they add up where they are
    by_layer: bool = False  # each layer's as soon as its backward is done; else all at the end of the action
    last: bool = False  # last reduction of its stage in the step
    replicas: bool = False  # replicas add up what each has reduced; else it waits for a later reduction


def reductions(table: Table, rank: int) -> dict[Action, Reduction]:
    """The reduction of every B, I and W in the program of `rank`."""
    actions = [item for item in table.programs[rank] if isinstance(item, Action)]
    reduced = [(action.stage, action.micro) for action in actions if action.kind is Kind.REDUCE]
    last, every = dict(reduced), set(reduced)
    found: dict[Action, Reduction] = {}
    put_off = Counter[int]()  # by stage: how many I wait for their W
    for action in actions:
        kind, stage, micro = action
        if kind not in (Kind.B, Kind.I, Kind.W):
            continue
        put_off[stage] -= kind is Kind.W
        now = action.makes_weight_gradients and (stage, micro) in every
        # While an I waits for its W, the pending gradients of vectors have a wider data type than those that a B makes.
        # FSDP2 cannot reduce both at once, so that B reduces at its end.
        by_layer = now and kind is Kind.B and not put_off[stage]
        ends = now and last[stage] == micro
        # A reduction that waits for the replicas must be of the same parameters as the next. After a split backward
        # it may not be: a W takes along the vectors' gradients of every I before it.
        found[action] = Reduction(now, by_layer, ends, replicas=ends or table.splits_backward)
        put_off[stage] += kind is Kind.I
    return found
