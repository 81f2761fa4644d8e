"""The order that a search finds: complete, within memory, and never worse than a named schedule."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.schedule import search as searching
from megalite.schedule.actions import Kind, Orders, Table
from megalite.schedule.check import check
from megalite.schedule.communication import communicate
from megalite.schedule.generate import NAMES, build
from megalite.schedule.problem import StageCosts
from megalite.schedule.search import memory_of, search
from megalite.schedule.simulate import simulate
from megalite_tools.bench.pipelines import SearchCase, random_case

UNEQUAL = tuple(StageCosts(f, 2 * f, f, f, 1.0, 0.5) for f in (1.0, 0.8, 1.2, 1.5))
ONE = (0, 1, 2, 3)


def table(case: SearchCase, orders: Orders) -> Table:
    times = tuple(stage.times for stage in case.stages)
    return Table("found", case.m, case.placement, communicate(orders, case.placement, times), times)


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "EFFORT", 20_000)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32).map(Random).map(lambda random: random_case(random, 5, 10)))
def test_an_order_is_whole_within_memory_and_no_slower_than_any_named_one(case: SearchCase) -> None:
    found = case.search()
    made = table(case, found.orders)
    assert check(made) == []
    assert float(simulate(made, transfer=case.transfer).makespan) == pytest.approx(found.makespan)
    held = memory_of(found.orders, case.placement, case.m, case.stages)
    assert all(most <= limit * (1 + 1e-6) for most, limit in zip(held, case.limits, strict=True))
    assert case.splits or not made.splits_backward
    for order in found.orders:
        for stage in {action.stage for action in order}:
            for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
                micros = [action.micro for action in order if action.stage == stage and action.kind in kinds]
                assert micros == sorted(micros)
    for name in NAMES:
        named = build(name, len(case.limits), case.m, 1 if name == "interleaved_1f1b" else None)
        if named.placement == case.placement and (case.splits or not named.splits_backward):
            holds = memory_of(named.orders, case.placement, case.m, case.stages)
            if all(most <= limit for most, limit in zip(holds, case.limits, strict=True)):
                slower = simulate(Table(name, case.m, case.placement, named.programs, made.times), None, case.transfer)
                assert found.makespan <= float(slower.makespan) * (1 + 1e-9)
    assert found.bound <= found.makespan * (1 + 1e-9)


def test_unequal_stages_are_ordered_better_than_by_name() -> None:
    found = search(ONE, 12, UNEQUAL, (4.0,) * 4, transfer=2.0)
    assert (found.name, found.best_named) == ("auto", "zb_h1")
    assert found.named.keys() == {"1f1b", "zb_h1"}, "the others hold more"
    assert found.makespan < 0.93 * found.named["zb_h1"]


def test_stages_that_take_their_time_need_less_memory_than_any_named_order() -> None:
    found = search(ONE, 12, UNEQUAL, (3.0,) * 4)
    assert found.best_named is None
    assert found.makespan == found.bound


def test_equal_stages_need_no_order_of_their_own() -> None:
    stages = (StageCosts(1, 2, 1, 1, 1.0, 0.5),) * 4
    assert search(ONE, 8, stages, (4.0,) * 4).name == "zb_h1"
    assert search(ONE, 8, stages, (4.0,) * 4, splits=False).name == "1f1b"
    looped = search((0, 1, 0, 1), 4, stages, (9.0,) * 2)
    assert "interleaved_1f1b" in looped.named


def test_of_named_schedules_that_take_as_long_the_one_that_holds_least_is_taken() -> None:
    stages = (StageCosts(1, 2, 1.5, 1.5, 1.0, 1.0),) * 4
    found = search(ONE, 8, stages, (8.0,) * 4, splits=False)
    assert found.named["gpipe"] == found.named["1f1b"]
    assert (found.name, found.best_named) == ("1f1b", "1f1b")


def test_more_memory_is_used_where_transfers_take_long() -> None:
    few, many = (search(ONE, 12, UNEQUAL, (limit,) * 4, transfer=2.0) for limit in (4.0, 6.0))
    assert many.makespan < 0.9 * few.makespan
    assert max(memory_of(many.orders, ONE, 12, UNEQUAL)) > 4.0


def test_an_order_without_memory_for_two_micro_batches_takes_them_in_turn() -> None:
    found = search(ONE, 3, UNEQUAL, (1.0,) * 4)
    assert memory_of(found.orders, ONE, 3, UNEQUAL) == [1.0] * 4
    assert found.best_named is None


def test_too_little_memory_is_told() -> None:
    with pytest.raises(InputError) as caught:
        search((0, 1, 1, 0), 4, UNEQUAL, (2.0, 1.5))
    assert str(caught.value) == (
        "no order of a pipeline fits: rank 1 may hold 1.5, 0.5 less than the 2 that one micro-batch takes"
    )


def test_the_same_order_is_found_every_time() -> None:
    case = random_case(Random(7), 4, 8)
    assert case.search().orders == case.search().orders
