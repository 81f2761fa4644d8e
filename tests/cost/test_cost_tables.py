"""Clocks of named schedules are those of their tables, and the steps of a rank are its actions."""

import random

import pytest

from megalite.cost.held_bytes import STEPS_PER_STAGE, StageBytes, Step, most_held, steps_of
from megalite.cost.schedule_tables import costs_of, named_clock
from megalite.plan.pipeline import sharded
from megalite.schedule.actions import Action, Kind, Table
from megalite.schedule.clock import clock_of
from megalite.schedule.generate import NAMES, orders_of


@pytest.mark.parametrize("mode", [None, "ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("schedule", "paired"), [*((name, False) for name in NAMES), ("dualpipev", True)])
def test_the_clock_of_a_named_schedule_is_that_of_its_table(schedule: str, paired: bool, mode: str | None) -> None:
    draw = random.Random(f"{schedule} {mode}")
    for p in range(1, 5):
        for m in (1, 2, 5, 9):
            placement, orders = orders_of(schedule, p, m)
            table = sharded(Table(schedule, m, placement, orders, paired=paired), mode)
            quick, slow = named_clock(placement, orders, m, mode, paired), clock_of(table, costs_of(table))
            # Freed weights have no cost, and a clock of its own leaves them out.
            seconds = {cost: draw.random() * (cost.kind is not Kind.RESHARD) for cost in slow.classes}
            assert {*quick.classes} == {cost for cost in slow.classes if cost.kind is not Kind.RESHARD}
            ends = [clock.run([seconds[cost] for cost in clock.classes], 0.25) for clock in (quick, slow)]
            assert ends[0] == pytest.approx(ends[1], rel=1e-12), (p, m)


def test_steps_of_a_rank() -> None:
    order = [
        Action(Kind.F, 1, 0),
        Action(Kind.F, 1, 1),
        Action(Kind.B, 1, 0),
        Action(Kind.I, 1, 1),
        Action(Kind.W, 1, 1),
    ]
    found = [
        Step(step - STEPS_PER_STAGE) if step - STEPS_PER_STAGE in set(Step) else step - STEPS_PER_STAGE
        for step in steps_of(order)
    ]
    ended = found.pop()
    assert found == [Step.BEGIN, Step.F, Step.F, Step.B_FIRST, Step.I, Step.W_LAST]
    assert ended == Step.W_LAST + 4


@pytest.mark.parametrize(
    ("each_time", "at_all", "most"),
    [
        (True, True, 100 + 2 * 10),  # both micro-batches in flight; or gradients: 100 + 4 + 10, or 100 + 30 + 4
        (False, True, 100 + 10 + 40),  # one in flight beside the sum of gradients
        (False, False, 100 + 10 + 40),
    ],
)
def test_most_held(each_time: bool, at_all: bool, most: float) -> None:
    stage = StageBytes(kept=10, left=3, gathered=100, whole=40, layers=9, reduced=4, buffer=5)
    order = [Action(kind, 0, micro) for kind in (Kind.F, Kind.B) for micro in range(2)]
    assert most_held(steps_of(order), {0: stage}, each_time, at_all) == most


def test_layers_have_all_their_gradients_at_the_end_of_w() -> None:
    stage = StageBytes(kept=10, left=3, gathered=100, whole=40, layers=39, reduced=4, buffer=5)
    order = [Action(kind, 0, 0) for kind in (Kind.F, Kind.I, Kind.W)]
    assert most_held(steps_of(order), {0: stage}, True, True) == 100 + 39
