"""Search for the rank that the others wait for in vain, in what all have recorded of their collectives.

A rank that stands at a lower number than others of a group is waited for; one that has called another collective under
the same number has gone astray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.base.errors import ranks_text
from megalite.distributed.health.flight_recorder import Call, RecordedFlight

# Collectives of which all ranks of a group give tensors of the same sizes.
UNIFORM_CALLS = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")


Group = tuple[str, range | tuple[int, ...]]  # name and ranks


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank: its node, its step, and what it does."""

    host: str
    step: int
    what: str


def verdict(flights: Mapping[int, RecordedFlight], places: Mapping[int, RankPlace]) -> str:
    """Name the rank that the others wait for, in a sentence; empty if the records do not show it.

    flights: of the ranks that have answered. places: of all that anything is known of.
    """
    latest = {rank: _latest(flight) for rank, flight in flights.items()}
    # A group is known by its name and its ranks: several may have one name.
    return _astray(flights, places) or _awaited(flights, latest, places) or _all_wait(flights, places)


def _latest(flight: RecordedFlight) -> dict[Group, int]:
    """The number of the latest collective of every group."""
    found: dict[Group, int] = {}
    for call in flight.calls:
        for _, ranks in _group(flight, call):
            found[call.group, ranks] = max(call.number, found.get((call.group, ranks), 0))
    return found


def _astray(flights: Mapping[int, RecordedFlight], places: Mapping[int, RankPlace]) -> str:
    """Report different collectives that ranks have called under one number, and who is alone with one; else empty."""
    by_number: dict[tuple[int, Group], dict[int, Call]] = {}
    for rank in sorted(flights):
        for call in flights[rank].calls:
            for _, ranks in _group(flights[rank], call) if call.peer is None else []:
                by_number.setdefault((call.number, (call.group, ranks)), {})[rank] = call
    for (number, _), calls in by_number.items():
        kinds: dict[str, list[int]] = {}
        for rank, call in calls.items():
            kinds.setdefault(str(call) if call.kind.startswith(UNIFORM_CALLS) else call.kind, []).append(rank)
        if len(kinds) < 2 or all(call.done for call in calls.values()):
            continue
        (_, other), (_, odd) = (
            max(kinds.items(), key=lambda each: len(each[1])),
            min(reversed(kinds.items()), key=lambda each: len(each[1])),
        )
        call, usual = calls[odd[0]], calls[other[0]]
        return (
            f"{_who(odd, places)} called {call} where {_who(other, places)} called {usual}, as number {number} of "
            f"{_name(flights[odd[0]], call)}, {_step(odd[0], places)}"
        )
    return ""


@dataclass(frozen=True)
class _Wait:
    """Wait of `rank` for `others` in `call`, or without a call for their message."""

    rank: int
    others: tuple[int, ...]
    call: Call | None


def _waits(flights: Mapping[int, RecordedFlight], latest: Mapping[int, Mapping[Group, int]]) -> list[_Wait]:
    found = []
    for rank, flight in sorted(flights.items()):
        if flight.awaits:
            found.append(_Wait(rank, flight.awaits, None))
        for call in flight.calls:
            if call.done:
                continue
            if call.peer is not None:
                theirs = flights[call.peer].calls if call.peer in flights else ()
                if call.kind == "recv" and not any(c.kind == "send" and c.peer == rank and not c.done for c in theirs):
                    found.append(_Wait(rank, (call.peer,), call))
                continue
            members = [ranks for _, ranks in _group(flight, call)]
            late = tuple(
                other
                for ranks in members
                for other in ranks
                if other != rank and (other not in latest or latest[other].get((call.group, ranks), 0) < call.number)
            )
            if late:
                found.append(_Wait(rank, late, call))
    return found


def _awaited(
    flights: Mapping[int, RecordedFlight], latest: Mapping[int, Mapping[Group, int]], places: Mapping[int, RankPlace]
) -> str:
    """Name the ranks that are waited for and wait for nobody, or that wait for each other; empty if no rank waits."""
    waits = _waits(flights, latest)
    waiting = {wait.rank for wait in waits}
    awaited = {other for wait in waits for other in wait.others}
    roots = sorted(awaited - waiting)
    if not waits:
        return ""
    if not roots:
        both = [wait for wait in waits if wait.rank in awaited]
        told = " and ".join(f"rank {wait.rank} in {_waited(flights, wait)}" for wait in both[:2])
        return f"{_who(sorted(waiting & awaited), places)} wait for each other, {_step(both[0].rank, places)}: {told}"
    # The wait that is closest to those who wait for nobody: the others of a large group have more to wait for.
    wait = min(
        (wait for wait in waits if set(wait.others) & set(roots)),
        key=lambda wait: (len(set(wait.others) - set(roots)), len(wait.others), wait.rank),
    )
    late, waiters = sorted(set(wait.others) & set(roots)), [wait.rank]
    if wait.call is not None:
        waiters = sorted({other.rank for other in waits if other.call == wait.call and other.others == wait.others})
    others = f"{_who(waiters, places)} {'waits' if len(waiters) == 1 else 'wait'}"
    step = _step(wait.rank, places)
    if late[0] not in flights:
        return f"{_who(late, places)} gave no answer; {others} in {_waited(flights, wait)}, {step}"
    has, at = "has" if len(late) == 1 else "have", f"; it is at: {places[late[0]].what}" if late[0] in places else ""
    done = "sent or taken" if wait.call is None else "sent" if wait.call.peer is not None else "called"
    return f"{_who(late, places)} {has} not {done} {_waited(flights, wait)}, in which {others}, {step}{at}"


def _all_wait(flights: Mapping[int, RecordedFlight], places: Mapping[int, RankPlace]) -> str:
    """Report a collective that all ranks of a group are in and that does not end; empty if there is none."""
    for rank, flight in sorted(flights.items()):
        for call in flight.calls:
            for _, ranks in _group(flight, call) if call.peer is None and not call.done else []:
                if len(ranks) > 1 and all(other in flights and call in flights[other].calls for other in ranks):
                    told = (
                        f"all ranks are in {call}, number {call.number} of {_name(flight, call)}, {_step(rank, places)}"
                    )
                    return f"{told}, and it does not end; look at the network between them"
    return ""


def _group(flight: RecordedFlight, call: Call) -> list[tuple[str, range | tuple[int, ...]]]:
    """The purpose and the ranks of a call's group: one entry, or none if it is not known."""
    return [flight.groups[call.group]] if call.group in flight.groups else []


def _name(flight: RecordedFlight, call: Call) -> str:
    known = _group(flight, call)
    if not known:
        return f"group {call.group}"
    purpose, ranks = known[0]
    purpose = "" if purpose in ("", "undefined", "default_pg") else f"{purpose.removeprefix('mesh_')} "
    return f"the {purpose}group of {ranks_text(ranks)}"


def _waited(flights: Mapping[int, RecordedFlight], wait: _Wait) -> str:
    """Describe the message or the collective that is waited for."""
    if wait.call is None:
        return "a message"
    if wait.call.peer is not None:
        return f"a message of {wait.call.tensors}"
    return f"{wait.call}, number {wait.call.number} of {_name(flights[wait.rank], wait.call)}"


def _who(ranks: Sequence[int], places: Mapping[int, RankPlace]) -> str:
    hosts = {places[rank].host for rank in ranks if rank in places}
    return ranks_text(ranks) + (f" on {hosts.pop()}" if len(hosts) == 1 else "")


def _step(rank: int, places: Mapping[int, RankPlace]) -> str:
    return f"in step {places[rank].step}" if rank in places else "in an unknown step"
