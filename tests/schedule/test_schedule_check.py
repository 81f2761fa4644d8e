"""check() reports every broken table, in words that say what to look at."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import (
    Item,
    actions_of,
    free_table,
    mutate,
    names,
    randoms,
    runs,
    sharded_tables,
    small_tables,
    tables,
    with_program,
)

from megalite.schedule.actions import COMPUTE, Action, Exchange, Kind, Table
from megalite.schedule.check import check
from megalite.schedule.generate import NAMES, build


@settings(max_examples=60, deadline=None)
@given(tables())
def test_generated_tables_are_fine(table: Table) -> None:
    assert check(table) == []
    assert runs(table)


@pytest.mark.parametrize("name", NAMES)
def test_every_generated_schedule_is_fine(name: str) -> None:
    for p, m in ((1, 1), (1, 5), (2, 1), (3, 2), (4, 7), (8, 3)):
        assert check(build(name, p, m)) == []


@given(randoms)
def test_any_order_on_any_placement_gets_correct_transfers(random: Random) -> None:
    table = free_table(random)
    assert check(table) == []
    assert runs(table)


@settings(max_examples=500)
@given(st.one_of(small_tables, sharded_tables), randoms)
def test_check_agrees_with_running_the_table(table: Table, random: Random) -> None:
    mutant = mutate(table, random)
    assert (check(mutant) == []) == runs(mutant)


Mutation = Callable[[Table, Random], Table]


def pick(table: Table, random: Random, kinds: set[Kind]) -> tuple[int, int]:
    """Rank and index of a program item that is, or contains, an action of one of `kinds`."""
    return random.choice(
        [
            (rank, index)
            for rank, program in enumerate(table.programs)
            for index, item in enumerate(program)
            if kinds & {action.kind for action in actions_of(item)}
        ]
    )


def drop_compute(table: Table, random: Random) -> Table:
    rank, index = pick(table, random, set(COMPUTE))
    program = list(table.programs[rank])
    del program[index]
    return with_program(table, rank, program)


def drop_transfer(table: Table, random: Random, kind: Kind) -> Table:
    rank, index = pick(table, random, {kind})
    program = list(table.programs[rank])
    program[index] = Exchange(tuple(action for action in actions_of(program[index]) if action.kind != kind))
    return with_program(table, rank, program)


def drop_send(table: Table, random: Random) -> Table:
    return drop_transfer(table, random, random.choice([Kind.SEND_F, Kind.SEND_B]))


def drop_receive(table: Table, random: Random) -> Table:
    return drop_transfer(table, random, random.choice([Kind.RECV_F, Kind.RECV_B]))


def repeat_item(table: Table, random: Random) -> Table:
    rank, index = pick(table, random, set(Kind))
    program = list(table.programs[rank])
    program.insert(random.randint(0, len(program)), program[index])
    return with_program(table, rank, program)


def move_to_another_rank(table: Table, random: Random) -> Table:
    rank, index = pick(table, random, set(Kind))
    program = list(table.programs[rank])
    item = program.pop(index)
    other = random.choice([other for other in range(table.ranks) if other != rank])
    return with_program(with_program(table, rank, program), other, [*table.programs[other], item])


def swap(table: Table, rank: int, first: Action, second: Action) -> Table:
    program = list(table.programs[rank])
    at, to = program.index(first), program.index(second)
    program[at], program[to] = second, first
    return with_program(table, rank, program)


def swap_forward_and_backward(table: Table, random: Random) -> Table:
    rank, micro = random.randrange(table.ranks), random.randrange(table.micro_batches)
    return swap(table, rank, Action(Kind.F, rank, micro), Action(Kind.B, rank, micro))


def swap_micro_batches(table: Table, random: Random) -> Table:
    rank, kind = random.randrange(table.ranks), random.choice([Kind.F, Kind.B])
    first, second = random.sample(range(table.micro_batches), 2)
    return swap(table, rank, Action(kind, rank, first), Action(kind, rank, second))


def move_exchange_to_front(table: Table, random: Random) -> Table:
    rank = random.randrange(table.ranks)
    program = list(table.programs[rank])
    index = random.choice([at for at, item in enumerate(program) if at > 0 and isinstance(item, Exchange)])
    program.insert(0, program.pop(index))
    return with_program(table, rank, program)


@pytest.mark.parametrize(
    "break_it",
    [
        drop_compute,
        drop_send,
        drop_receive,
        repeat_item,
        move_to_another_rank,
        swap_forward_and_backward,
        swap_micro_batches,
        move_exchange_to_front,
    ],
)
@given(name=names, p=st.integers(2, 8), m=st.integers(2, 32), random=randoms)
def test_every_mutation_is_reported(break_it: Mutation, name: str, p: int, m: int, random: Random) -> None:
    assert check(break_it(build(name, p, m), random))


def blocking_sends_first(table: Table) -> Table:
    """Every exchange as single blocking transfers, sends before receives."""

    def split(item: Item) -> list[Item]:
        if isinstance(item, Action):
            return [item]
        sends_first = sorted(item.actions, key=lambda action: action != action.transfer)
        return [Exchange((action,)) for action in sends_first]

    return replace(table, programs=tuple(tuple(one for item in p for one in split(item)) for p in table.programs))


@given(st.integers(2, 8), st.integers(1, 24))
def test_1f1b_with_blocking_sends_deadlocks(p: int, more: int) -> None:
    problems = check(blocking_sends_first(build("1f1b", p, p + more)))
    assert problems
    assert all(problem.startswith("deadlock: ") for problem in problems)


def test_deadlock_names_who_waits_for_whom() -> None:
    assert check(blocking_sends_first(build("1f1b", 2, 3))) == [
        "deadlock: rank 0 waits at SEND_F(stage 0, micro-batch 2) for rank 1, "
        "which stands at SEND_B(stage 1, micro-batch 1)",
        "deadlock: rank 1 waits at SEND_B(stage 1, micro-batch 1) for rank 0, "
        "which stands at SEND_F(stage 0, micro-batch 2)",
    ]


def test_waiting_for_a_rank_that_has_finished() -> None:
    table = build("gpipe", 2, 1)
    last = [item for item in table.programs[1] if item != Exchange((Action(Kind.SEND_B, 1, 0),))]
    assert check(with_program(table, 1, last)) == [
        "rank 1 lacks SEND_B(stage 1, micro-batch 0)",
        "deadlock: rank 0 waits at RECV_B(stage 0, micro-batch 0) for rank 1, which has finished",
    ]


F, B = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)
SEND, RECV = Action(Kind.SEND_F, 0, 0), Action(Kind.RECV_F, 1, 0)


@pytest.mark.parametrize(
    ("placement", "programs", "expected"),
    [
        ((0,), [[B, F]], ["rank 0 runs B(stage 0, micro-batch 0) before F(stage 0, micro-batch 0)"]),
        ((0,), [[F, B, F]], ["rank 0 has F(stage 0, micro-batch 0) 2 times"]),
        ((0,), [[F]], ["rank 0 lacks B(stage 0, micro-batch 0)"]),
        ((1,), [[F, B]], ["placement (1,) names a rank that has no program: there are 1"]),
        ((0,), [[], [F, B]], [f"rank 1 has {action} whose stage is on rank 0" for action in (F, B)]),
        ((0,), [[F, B, Exchange((SEND,))]], [f"rank 0 has {SEND} in a schedule of 1 stage and 1 micro-batch"]),
        ((0, 1), [[F, SEND, B], []], [f"rank 0 has {SEND} outside an exchange"]),
        (
            (0, 0),
            [[F, Exchange((SEND, RECV)), Action(Kind.F, 1, 0), Action(Kind.B, 1, 0), B]],
            [f"rank 0 has {action}, but both stages are on that rank" for action in (RECV, SEND)],
        ),
    ],
)
def test_problems_are_readable(placement: tuple[int, ...], programs: list[list[Item]], expected: list[str]) -> None:
    assert check(Table("hand-made", 1, placement, tuple(map(tuple, programs)))) == expected


def test_crossed_transfers_are_reported() -> None:
    """Two sends posted at once are received one by one in the other order: nothing blocks, but data is swapped."""
    table = build("gpipe", 2, 2)
    forward_0, send_0, forward_1, send_1, *backwards = table.programs[0]
    sends = Exchange((*actions_of(send_0), *actions_of(send_1)))
    table = with_program(table, 0, [forward_0, forward_1, sends, *backwards])
    receive_0, forward_0, receive_1, *rest = table.programs[1]
    table = with_program(table, 1, [receive_1, receive_0, forward_0, *rest])
    assert not runs(table)
    assert check(table) == [
        "rank 0 posts SEND_F(stage 0, micro-batch 0) where rank 1 posts RECV_F(stage 1, micro-batch 1): "
        "data would be swapped"
    ]
