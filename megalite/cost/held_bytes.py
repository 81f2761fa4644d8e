"""Bytes that a pipeline rank holds at the ends of its actions. Imports no torch.

`plan.memory.walk` goes through the layers of every action. Here an action is a step or two, and what it needs for a
moment is left out. So this takes a hundredth of the time, and never counts more than the walk.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from megalite.schedule.actions import Action, Kind


class StageBytes(NamedTuple):
    """Bytes that a stage holds.

    kept: activations of a micro-batch, from F to its B or I. left: what an I leaves to its W. gathered: weights, from
    the first action of a step to the last. whole: gradients before they are reduced. layers: of these, the layers'.
    reduced: what a rank keeps of them. buffer: of the last reduction of an action, until the next one or the step's
    last.
    """

    kept: float
    left: float
    gathered: float
    whole: float
    layers: float
    reduced: float
    buffer: float


class Step(IntEnum):
    """Changes of the bytes that a stage holds: actions, by their place among those of the stage."""

    BEGIN = 0
    F = 1
    I = 2  # noqa: E741 - the letter of the action
    B_FIRST = 3
    B = 4
    B_LAST = 5
    B_ONLY = 6
    W_FIRST = 7  # and then, W_FIRST + W_END_OFFSET
    W = 8
    W_LAST = 9
    W_ONLY = 10


W_END_OFFSET = 4  # from a step of W, when all layers have their gradients, to its end
STEPS_PER_STAGE = max(Step) + W_END_OFFSET + 1


def steps_of(order: Sequence[Action]) -> list[int]:
    """Steps of a rank's actions in order, each as STEPS_PER_STAGE · the stage + its step; a W has two."""
    last = {action.stage: index for index, action in enumerate(order)}  # it makes gradients
    begun, made, found = set[int](), set[int](), list[int]()
    for index, (kind, stage, _) in enumerate(order):
        at = STEPS_PER_STAGE * stage
        if stage not in begun:
            begun.add(stage)
            found.append(at + Step.BEGIN)
        if kind is Kind.F:
            found.append(at + Step.F)
        elif kind is Kind.I:
            found.append(at + Step.I)
        else:
            first, ends = stage not in made, index == last[stage]
            place = (Step.B_ONLY if ends else Step.B_FIRST) if first else Step.B_LAST if ends else Step.B
            made.add(stage)
            found.append(at + place)
            if kind is Kind.W:
                found[-1] += Step.W - Step.B
                found.append(found[-1] + W_END_OFFSET)
    return found


def most_held(steps: Sequence[int], stages: Mapping[int, StageBytes], each_time: bool, at_all: bool) -> float:
    """The most bytes of activations, gathered weights and gradients after any of a rank's `steps`.

    each_time: gradients are reduced after every micro-batch. at_all: they are reduced.
    """
    changes = [0.0] * (STEPS_PER_STAGE * (max(stages) + 1))
    for stage, held in stages.items():
        changes[STEPS_PER_STAGE * stage : STEPS_PER_STAGE * (stage + 1)] = _changes(held, each_time, at_all)
    return max(accumulate(map(changes.__getitem__, steps)))


def _changes(held: StageBytes, each_time: bool, at_all: bool) -> list[float]:
    """Bytes by which each step changes what a stage holds."""
    kept, left, gathered, whole, layers, reduced, buffer = held
    if not at_all:
        made = [whole, 0.0, 0.0, whole]
    elif each_time:
        made = [reduced + buffer, 0.0, -buffer - gathered, reduced - gathered]
    else:
        made = [whole, 0.0, reduced - whole - gathered, reduced - gathered]
    # The gradients of all layers are there before the first is reduced, in place of the buffer.
    peak = [layers, layers - buffer, layers - buffer, layers] if each_time and at_all else [0.0] * 4
    return [
        gathered,
        kept,
        left - kept,
        *(change - kept for change in made),
        *(change - left for change in peak),
        *(after - before for after, before in zip(made, peak, strict=True)),
    ]
