"""Who is named for a hang, by what all ranks have recorded: of imagined jobs here; test_watchdog has real ones."""

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from megalite.distributed.health.diagnosis import RankPlace, verdict
from megalite.distributed.health.flight_recorder import Call, RecordedFlight

LAYOUT = {"tp": [(0, 1), (2, 3), (4, 5), (6, 7)], "dp": [(0, 2), (1, 3), (4, 6), (5, 7)], "world": [tuple(range(8))]}
GROUPS = {f"{axis} {at}": (f"mesh_{axis}", ranks) for axis, lines in LAYOUT.items() for at, ranks in enumerate(lines)}
programs = st.lists(st.sampled_from(["tp", "dp", "world"]), min_size=1, max_size=12)


@dataclass
class Rank:
    """A rank of an imagined job: how far it is in its program, and its calls."""

    calls: list[Call]
    at: int = 0
    asleep: bool = False


def group_of(axis: str, rank: int) -> str:
    return next(name for name, (_, ranks) in GROUPS.items() if name.startswith(axis) and rank in ranks)


def run(
    program: list[str], sleeper: int, sleeps_at: int, astray: tuple[int, int] = (-1, -1)
) -> dict[int, RecordedFlight]:
    """All ranks call the collectives of `program`; one sleeps before one of them, or calls another in its place."""
    ranks = [Rank([]) for _ in range(8)]
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            if rank.calls and not rank.calls[-1].done:
                last = rank.calls[-1]
                members = GROUPS[last.group][1]
                if not all(
                    any(replace(call, done=False) == replace(last, done=False) for call in ranks[m].calls)
                    for m in members
                ):
                    continue
                rank.calls[-1] = replace(last, done=True)
                moved = True
            if rank.at == len(program) or (number == sleeper and rank.at == sleeps_at):
                continue
            group = group_of(program[rank.at], number)
            count = 1 + sum(call.group == group for call in rank.calls)
            kind = "all_gather" if (number, rank.at) == astray else "all_reduce"
            rank.calls.append(Call(group, count, kind, "float [10]", False))
            rank.at += 1
            moved = True
    mine = {rank: {name: group for name, group in GROUPS.items() if rank in group[1]} for rank in range(8)}
    return {rank: RecordedFlight(tuple(ranks[rank].calls), mine[rank]) for rank in range(8)}


PLACES = {rank: RankPlace(f"n{rank // 4}", 7, f"doing {rank}") for rank in range(8)}


@given(programs, st.integers(0, 7), st.integers(0, 11))
def test_a_rank_that_sleeps_is_named(program: list[str], sleeper: int, at: int) -> None:
    at %= len(program)
    told = verdict(run(program, sleeper, at), PLACES)
    assert told.startswith(f"rank {sleeper} on n{sleeper // 4} has not called all_reduce of float [10], number ")
    assert any(f" of the {axis} group of " in told for axis in program[at:])
    assert told.endswith(f", in step 7; it is at: doing {sleeper}")


@given(programs, st.integers(0, 7), st.integers(0, 11))
def test_a_rank_that_gives_no_answer_is_named(program: list[str], sleeper: int, at: int) -> None:
    flights = run(program, sleeper, at % len(program))
    del flights[sleeper]
    assert verdict(flights, PLACES).startswith(f"rank {sleeper} on n{sleeper // 4} gave no answer; ")


@given(programs, st.integers(0, 7), st.integers(0, 11))
def test_another_collective_is_named_with_both_sides(program: list[str], rank: int, at: int) -> None:
    at %= len(program)
    told = verdict(run(program, -1, -1, (rank, at)), PLACES)
    group = GROUPS[group_of(program[at], rank)][1]
    assert " called all_gather of float [10]" in told
    assert f"of the {program[at]} group of {len(group)} ranks" in told
    if len(group) > 2:
        assert told.startswith(f"rank {rank} on n{rank // 4} called all_gather of float [10] where 7 ranks (")


@given(programs)
def test_a_job_that_goes_on_blames_nobody(program: list[str]) -> None:
    assert verdict(run(program, -1, -1), PLACES) == ""


@given(programs, st.integers(0, 7), st.integers(0, 11))
def test_records_survive_their_way_over_the_store(program: list[str], sleeper: int, at: int) -> None:
    for flight in run(program, sleeper, at % len(program)).values():
        assert RecordedFlight.of_json(flight.to_json()).calls == flight.calls


def flight(*calls: Call, awaits: tuple[int, ...] = ()) -> RecordedFlight:
    return RecordedFlight(calls, {"g": ("mesh_pp", range(0, 4, 2)), "w": ("default_pg", range(4))}, awaits)


def test_whose_message_does_not_come_is_named() -> None:
    world = Call("w", 3, "all_reduce", "float [1]", False)
    told = verdict({0: flight(awaits=(2,)), 1: flight(world), 2: flight(), 3: flight(world)}, PLACES)
    assert told == (
        "rank 2 on n0 has not sent or taken a message, in which rank 0 on n0 waits, in step 7; it is at: doing 2"
    )


def test_a_recorded_message_that_is_not_sent_names_its_sender() -> None:
    receive = Call("g", 0, "recv", "float [4]", False, peer=2)
    assert verdict({0: flight(receive), 2: flight()}, PLACES).startswith(
        "rank 2 on n0 has not sent a message of float [4]"
    )
    send = Call("g", 0, "send", "float [4]", False, peer=0)
    assert verdict({0: flight(receive), 2: flight(send)}, PLACES) == ""


def test_ranks_that_wait_for_each_other_are_told() -> None:
    calls = [Call("a", 1, "all_reduce", "float [1]", False), Call("b", 1, "all_gather", "float [2]", False)]
    groups = {"a": ("", (0, 1)), "b": ("", (0, 1))}
    told = verdict({rank: RecordedFlight((calls[rank],), groups) for rank in (0, 1)}, PLACES)
    assert told.startswith(
        "2 ranks (0-1) on n0 wait for each other, in step 7: rank 0 in all_reduce of float [1], number 1"
    )


def test_a_network_that_loses_a_collective_is_told() -> None:
    call = Call("w", 3, "all_reduce", "float [1]", False)
    told = verdict({rank: flight(call) for rank in range(4)}, PLACES)
    assert told.startswith(
        "all ranks are in all_reduce of float [1], number 3 of the group of 4 ranks (0-3), in step 7"
    )


def test_sizes_may_differ_where_a_collective_allows_it() -> None:
    def sizes(kind: str) -> str:
        return verdict({rank: flight(Call("w", 1, kind, f"float [{rank}]", False)) for rank in range(4)}, PLACES)

    assert "called all_reduce of float [" in sizes("all_reduce")
    assert sizes("all_to_all") == ""
