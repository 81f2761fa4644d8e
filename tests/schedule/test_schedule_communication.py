"""Where transfers, gathers, reshards and reductions stand."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import runs, tables

from megalite.schedule.actions import COMPUTE, SHARDING, Action, Exchange, Kind, Table, inputs_of
from megalite.schedule.check import check
from megalite.schedule.communication import add_sharding
from megalite.schedule.generate import build
from megalite.schedule.simulate import simulate

GATHER, RESHARD, REDUCE = SHARDING


def short(table: Table, rank: int = 0) -> str:
    """`GATHER0 F0 B0 RESHARD0`: kinds and stages, without exchanges."""
    return " ".join(f"{item.kind}{item.stage}" for item in table.programs[rank] if isinstance(item, Action))


@settings(max_examples=60, deadline=None)
@given(tables())
def test_exchanges_done_in_order_hold_nothing_back(table: Table) -> None:
    """At unit costs the transfers of an exchange are ready at one time, and no later than those of the next."""
    for program, spans in zip(table.programs, simulate(table).spans, strict=True):
        starts = {span.action: span.start for span in spans}
        times = [{starts[action] for action in item.actions} for item in program if isinstance(item, Exchange)]
        assert all(len(ready) == 1 for ready in times)
        assert times == sorted(times, key=min)


@settings(max_examples=60, deadline=None)
@given(tables(6, 16), st.booleans(), st.booleans())
def test_sharding_is_complete_and_leaves_the_rest_alone(table: Table, gather: bool, reduce_each: bool) -> None:
    sharded = add_sharding(table, gather, reduce_each)
    assert check(sharded) == []
    assert runs(sharded)
    bare = [
        tuple(i for i in program if not (isinstance(i, Action) and i.kind in SHARDING)) for program in sharded.programs
    ]
    assert tuple(bare) == table.programs


@settings(max_examples=60, deadline=None)
@given(tables(6, 16), st.booleans(), st.booleans())
def test_how_often(table: Table, gather: bool, reduce_each: bool) -> None:
    for program in add_sharding(table, gather, reduce_each).programs:
        kinds = [item.kind for item in program if isinstance(item, Action)]
        stages = len({item.stage for item in program if isinstance(item, Action)})
        assert kinds.count(GATHER) == kinds.count(RESHARD) == gather * stages
        assert kinds.count(REDUCE) == stages * (table.micro_batches if reduce_each else 1)


def test_a_gather_overlaps_with_the_compute_before_the_use() -> None:
    assert short(add_sharding(build("interleaved_1f1b", 2, 2), gather=True, reduce_each=True)) == (
        "GATHER0 F0 GATHER2 F0 F2 F2 B2 REDUCE2 B2 REDUCE2 RESHARD2 B0 REDUCE0 B0 REDUCE0 RESHARD0"
    )


def test_gradients_are_reduced_after_the_half_of_backward_that_makes_them() -> None:
    assert short(add_sharding(build("zb_h1", 2, 2), gather=True, reduce_each=False), rank=1) == (
        "GATHER1 F1 I1 F1 I1 W1 W1 REDUCE1 RESHARD1"
    )
    assert short(add_sharding(build("zb_h1", 1, 2), gather=False, reduce_each=True)) == (
        "F0 I0 W0 REDUCE0 F0 I0 W0 REDUCE0"
    )


@pytest.mark.parametrize(
    ("order", "problems"),
    [
        ("GATHER F B RESHARD REDUCE", []),
        ("GATHER F RESHARD GATHER B REDUCE RESHARD", []),
        ("GATHER F I REDUCE W REDUCE RESHARD", ["has REDUCE(stage 0, micro-batch 0) without a new gradient"]),
        (
            "F GATHER B RESHARD REDUCE",
            ["runs F(stage 0, micro-batch 0) on weights that are not gathered"],
        ),
        (
            "GATHER F RESHARD I W REDUCE",
            [
                "runs I(stage 0, micro-batch 0) on weights that are not gathered",
                "runs W(stage 0, micro-batch 0) on weights that are not gathered",
            ],
        ),
        (
            "GATHER GATHER F B REDUCE",
            [
                "has GATHER(stage 0, micro-batch 0) on weights that GATHER(stage 0, micro-batch 0) has gathered",
                "never frees what GATHER(stage 0, micro-batch 0) has gathered",
            ],
        ),
        (
            "RESHARD GATHER F B RESHARD",
            [
                "has RESHARD(stage 0, micro-batch 0) on weights that are not gathered",
                "never reduces the gradients up to B(stage 0, micro-batch 0)",
            ],
        ),
    ],
)
def test_misplaced_sharding_is_reported(order: str, problems: list[str]) -> None:
    actions = tuple(Action(Kind(kind), 0, 0) for kind in order.split())
    assert check(Table("hand-made", 1, (0,), (actions,))) == [f"rank 0 {problem}" for problem in problems]


def test_sharding_is_optional() -> None:
    table = build("zbv", 2, 3)
    assert not {item.kind for item in table.programs[0] if isinstance(item, Action)} - set(COMPUTE)
    assert check(table) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.randoms(use_true_random=False))
def test_both_of_a_pair_begin_when_all_inputs_are_there(p: int, m: int, random: Random) -> None:
    times = tuple(tuple(random.uniform(0.5, 2) for _ in COMPUTE) for _ in range(2 * p))
    table = build("dualpipev", p, m, times=times, paired=True)
    assert check(table) == []
    assert len(table.pairs) >= (m - p if m >= 2 * p else 0)
    for program in table.programs:
        order = list(program)
        for first, second in table.pairs.items():
            if first in order:
                assert order[order.index(first) + 1] == second, "nothing is sent or received between"
    timeline = simulate(table, lambda action: times[action.stage][COMPUTE.index(action.kind)])
    spans = {span.action: span for rank in timeline.own for span in rank}
    ended = {action.result: spans[table.pairs.get(action, action)].end for action in spans}
    for first, second in table.pairs.items():
        assert spans[first].start >= max(ended[each] for each in inputs_of(first, second, table.stages))
        assert spans[second].start == spans[first].end


def test_a_pair_that_waits_for_the_half_beside_it_is_found() -> None:
    wrong = replace(build("dualpipev", 2, 6), paired=True)
    assert "rank 0 runs F(stage 3, micro-batch 2) before RECV_B(stage 0, micro-batch 0)" in check(wrong)


def test_results_of_a_pair_are_there_when_both_are_done() -> None:
    alone, paired = (simulate(build("dualpipev", 4, 16, paired=paired)) for paired in (False, True))
    assert (alone.makespan, paired.makespan) == (99, 102)
    assert paired.busy == alone.busy
