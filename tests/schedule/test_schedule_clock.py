"""The clock gives the times that `simulate` gives, whatever actions and transfers cost."""

from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import randoms, sharded_tables, small_tables

from megalite.base.errors import InputError
from megalite.schedule.actions import SHARDING, Action, Kind, Table
from megalite.schedule.clock import clock_of
from megalite.schedule.communication import add_sharding
from megalite.schedule.generate import build
from megalite.schedule.simulate import simulate

transfers = st.sampled_from([0.0, 0.25, 3.0])
in_turns = st.builds(partial(build, "dualpipev", paired=True), st.integers(1, 4), st.integers(1, 13))
sharded_in_turns = st.builds(add_sharding, in_turns, gather=st.booleans(), reduce_each=st.booleans())
some_tables = st.one_of(small_tables, sharded_tables, in_turns, sharded_in_turns)


def random_costs(table: Table, random: Random) -> dict[Action, float]:
    """A cost for every action that is no transfer."""
    return {
        item: random.choice([0.0, random.random(), 10 * random.random()])
        for program in table.programs
        for item in program
        if isinstance(item, Action)
    }


@given(some_tables, randoms, transfers)
def test_a_clock_ends_when_the_simulation_does(table: Table, random: Random, transfer: float) -> None:
    costs = random_costs(table, random)
    timeline = simulate(table, costs.__getitem__, transfer)
    clock = clock_of(table, lambda action: action)
    end, computed = clock.run([costs[action] for action in clock.classes], transfer)
    compute = [span.end for rank in timeline.own for span in rank if span.action.kind not in SHARDING]
    assert end == pytest.approx(timeline.makespan, rel=1e-12)
    assert computed == pytest.approx(max(compute), rel=1e-12)


@given(some_tables, randoms)
def test_actions_of_a_class_share_a_cost(table: Table, random: Random) -> None:
    clock = clock_of(table, lambda action: (action.kind, action.stage))
    assert len(clock.classes) == len(set(clock.classes))
    costs = {name: random.random() for name in clock.classes}
    end, _ = clock.run([costs[name] for name in clock.classes], 0.5)
    timeline = simulate(table, lambda action: costs[action.kind, action.stage], 0.5)
    assert end == pytest.approx(timeline.makespan, rel=1e-12)


@given(small_tables, randoms)
def test_a_clock_needs_no_transfers_in_the_table(table: Table, random: Random) -> None:
    costs = random_costs(table, random)
    orders = tuple(tuple(item for item in program if isinstance(item, Action)) for program in table.programs)
    bare = Table(table.name, table.micro_batches, table.placement, orders)
    clocks = clock_of(table, lambda action: action), clock_of(bare, lambda action: action)
    first, second = (clock.run([costs[action] for action in clock.classes], 1.5) for clock in clocks)
    assert first == second


def test_a_table_that_cannot_make_progress_is_refused() -> None:
    stuck = Table("stuck", 1, (0, 1), ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)), (Action(Kind.F, 1, 0),)))
    with pytest.raises(InputError, match="rank 0 is stuck at"):
        clock_of(stuck, lambda action: action)
