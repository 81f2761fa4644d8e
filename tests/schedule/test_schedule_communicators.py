"""No schedule deadlocks on communicators that run exchanges in order, and their simulated times obey laws."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import Item, actions_of, randoms, small_tables, tables

from megalite.base.errors import InputError
from megalite.schedule.actions import Action, Exchange, Kind, Table
from megalite.schedule.communicators import BY_NEIGHBOUR, ONE, SPLITS, Communicators
from megalite.schedule.generate import NAMES, build, build_forward
from megalite.schedule.simulate import cost_of, simulate

splits = pytest.mark.parametrize("split", SPLITS)
in_turns = st.builds(build, st.just("dualpipev"), st.integers(1, 6), st.integers(1, 16), paired=st.just(True))
all_tables = st.one_of(tables(6, 16), small_tables, in_turns)
transfer_times = st.sampled_from([0.0, 0.03, 0.5, 4.0])


def divided(table: Table, part: Callable[[Action], Hashable]) -> Table:
    """The table with an exchange for each part of an exchange, in the order of their first transfers."""

    def apart(item: Item) -> list[Item]:
        if isinstance(item, Action):
            return [item]
        parts = dict.fromkeys(map(part, item.actions))
        return [Exchange(tuple(action for action in item.actions if part(action) == name)) for name in parts]

    return replace(
        table, programs=tuple(tuple(one for item in program for one in apart(item)) for program in table.programs)
    )


def one_by_one(table: Table) -> Table:
    """The table as the narrowest channel carries it: one message at a time."""
    return divided(table, lambda action: action)


def ends(table: Table) -> bool:
    """Return whether a step ends on one communicator, and no sooner than the busiest rank has computed."""
    costs = costs_of(table, 0.5)
    busiest = max(sum(costs[item] for item in program if isinstance(item, Action)) for program in table.programs)
    return Communicators(table, SPLITS[ONE]).run(costs).makespan >= busiest * (1 - 1e-12)


def costs_of(table: Table, transfer: float, random: Random | None = None, spread: float = 0.0) -> dict[Action, float]:
    """Times of compute, drawn around UNIT or the times of the table within ± spread of them, and of transfers."""
    unit, found = cost_of(table.times), dict[Action, float]()
    for action in (action for program in table.programs for item in program for action in actions_of(item)):
        if action.is_transfer:
            found[action.transfer] = transfer
        else:
            found[action] = float(unit(action)) * (1 + spread * random.uniform(-1, 1) if random else 1)
    return found


@pytest.mark.parametrize("name", [*NAMES, "forward", "in turns"])
def test_no_schedule_deadlocks_on_one_communicator_that_carries_one_message_at_a_time(name: str) -> None:
    """Wider channels, and more communicators, only leave waits out."""
    for p in range(2, 9):
        for m in range(1, 17):
            if name == "in turns":
                table = build("dualpipev", p, m, paired=True)
            else:
                table = build_forward((*range(p), *range(p)), m) if name == "forward" else build(name, p, m)
            assert ends(one_by_one(table)), (p, m)


@settings(max_examples=40, deadline=None)
@given(all_tables)
def test_no_other_table_does_either_nor_communicators_of_neighbours_of_which_one_runs_at_a_time(table: Table) -> None:
    """A device with one queue (CUDA_DEVICE_MAX_CONNECTIONS=1) runs kernels in the order of their launch."""
    assert ends(one_by_one(table))
    assert ends(divided(table, table.peer))


def test_a_circle_of_exchanges_is_refused() -> None:
    forward, backward = Exchange((Action(Kind.SEND_F, 0, 1),)), Exchange((Action(Kind.RECV_B, 0, 0),))
    first = [Action(Kind.F, 0, 0), Exchange((Action(Kind.SEND_F, 0, 0),)), Action(Kind.F, 0, 1), forward, backward]
    second = [
        Exchange((Action(Kind.RECV_F, 1, 0),)),
        Action(Kind.F, 1, 0),
        Action(Kind.B, 1, 0),
        Exchange((backward.actions[0].transfer,)),
        Exchange((forward.actions[0].matching,)),
    ]
    table = Table("sends first", 2, (0, 1), (tuple(first), tuple(second)))
    with pytest.raises(InputError, match=r"wait for one another: .*SEND_F\(stage 0, micro-batch 1\)"):
        Communicators(table, SPLITS[ONE])
    split = Exchange((*forward.actions, *backward.actions))
    Communicators(replace(table, programs=((*first[:3], split), tuple(second))), SPLITS[ONE])


@splits
@settings(max_examples=40, deadline=None)
@given(table=all_tables)
def test_without_jitter_and_time_of_transfers_a_step_takes_what_its_table_says(split: str, table: Table) -> None:
    found = Communicators(table, SPLITS[split]).run(costs_of(table, 0.0))
    assert found.makespan == pytest.approx(float(simulate(table).makespan), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(all_tables, randoms, transfer_times)
def test_more_communicators_are_never_slower_and_none_is_faster_than_the_table(
    table: Table, random: Random, transfer: float
) -> None:
    costs = costs_of(table, transfer, random, 0.6)
    free = float(simulate(table, costs.__getitem__, transfer).makespan)
    times = {name: Communicators(table, split).run(costs).makespan for name, split in SPLITS.items()}
    for name, time in times.items():
        assert free <= time * (1 + 1e-12), name
        assert time <= times[ONE] * (1 + 1e-12), name


@splits
@settings(max_examples=30, deadline=None)
@given(table=small_tables, random=randoms, transfer=transfer_times)
def test_more_jitter_is_never_faster_in_the_mean(split: str, table: Table, random: Random, transfer: float) -> None:
    """A step is as long as its longest chain of times, so the mean of two opposite draws grows with their distance."""
    clock, mean, seed = Communicators(table, SPLITS[split]), costs_of(table, transfer), random.random()
    before = 0.0
    for spread in (0.0, 0.1, 0.4, 1.0):
        drawn = costs_of(table, transfer, Random(seed), spread)
        opposite = {action: 2 * mean[action] - time for action, time in drawn.items()}
        time = (clock.run(drawn).makespan + clock.run(opposite).makespan) / 2
        assert time >= before * (1 - 1e-12)
        before = time


def test_a_late_receive_holds_back_a_send_to_another_rank_on_one_communicator_only() -> None:
    """Rank 1 posts the receive of its second input before it sends its first result."""
    table = Table(
        "early receive",
        2,
        (0, 1, 2),
        (
            tuple(item for micro in (0, 1) for item in (Action(Kind.F, 0, micro), _sent(0, micro))),
            (_received(1, 0), _received(1, 1), Action(Kind.F, 1, 0), _sent(1, 0), Action(Kind.F, 1, 1), _sent(1, 1)),
            tuple(item for micro in (0, 1) for item in (_received(2, micro), Action(Kind.F, 2, micro))),
        ),
    )
    costs = costs_of(table, 0.5) | {Action(Kind.F, 0, 1): 10.0, Action(Kind.F, 2, 0): 20.0}
    last = 0.5 + 20 + 0.5 + 1  # the first result on its way to rank 2, its forward there, and the second's
    assert Communicators(table, SPLITS[ONE]).run(costs).makespan == 1 + 10 + 0.5 + last
    assert Communicators(table, SPLITS[BY_NEIGHBOUR]).run(costs).makespan == 1 + 0.5 + 1 + last


def test_the_share_of_compute_beside_exchanges() -> None:
    first = (Action(Kind.F, 0, 0), _sent(0, 0), Action(Kind.F, 0, 1), _sent(0, 1))
    second = (_received(1, 0), _received(1, 1), Action(Kind.F, 1, 0), Action(Kind.F, 1, 1))
    table = Table("early receive", 2, (0, 1), (first, second))
    costs = costs_of(table, 0.5) | {Action(Kind.F, 0, 0): 2.0, Action(Kind.F, 0, 1): 2.0}
    found = Communicators(table, SPLITS[ONE]).run(costs)
    assert found.makespan == 5.5  # exchanges of rank 1 are over at 2.5 and 4.5, its first forward runs from 2.5 to 3.5
    assert found.beside == (0.5 + 1.0) / 6


def _sent(stage: int, micro: int) -> Exchange:
    return Exchange((Action(Kind.SEND_F, stage, micro),))


def _received(stage: int, micro: int) -> Exchange:
    return Exchange((Action(Kind.RECV_F, stage, micro),))
