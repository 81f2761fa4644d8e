"""Ranks that look whether the next one is there. The ranks are objects of this process."""

import socket
import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megalite.distributed.health import neighbour, watchdog
from megalite.distributed.health.activity import Activity
from megalite.distributed.health.neighbour import MAX_REFUSALS, MAX_SILENCES, Neighbour, all_ended
from megalite.distributed.health.watchdog import Watchdog
from megalite.distributed.start.local import MEETING
from megalite.distributed.start.meeting import Meeting
from megalite.distributed.start.ranks import RankInfo

REAL = socket.create_connection


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEETING, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(neighbour, "LOOK_INTERVAL", 0.0)


@pytest.fixture
def two() -> list[Neighbour]:
    """Ranks 0 and 1, who have seen each other."""
    store = dist.HashStore()
    ranks = [Neighbour(store, RankInfo(rank, 2, rank)) for rank in range(2)]
    assert [rank.lost() for rank in ranks] == ["", ""]
    return ranks


def test_a_process_that_has_ended_is_lost(two: list[Neighbour]) -> None:
    two[1]._listener.close()
    told = [two[0].lost() for _ in range(MAX_REFUSALS)]
    assert told == [*[""] * (MAX_REFUSALS - 1), "the process of rank 1 has ended"]
    two[0].forgive()
    assert [two[0].lost() for _ in range(9)] == [""] * 9, "it has to be seen again"


def test_a_closed_connection_is_looked_into_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "LOOK_INTERVAL", 1000.0)
    monkeypatch.setattr(neighbour, "RETRY_INTERVAL", 0.0)
    store = dist.HashStore()
    ranks = [Neighbour(store, RankInfo(rank, 2, rank)) for rank in range(2)]
    assert [rank.lost() for rank in (*ranks, *ranks)] == [""] * 4
    for line in (ranks[1]._listener, *ranks[1]._heard):  # as the kernel does when a process ends
        line.close()
    told = [ranks[0].lost() for _ in range(MAX_REFUSALS)]
    assert told == [*[""] * (MAX_REFUSALS - 1), "the process of rank 1 has ended"]


def test_ranks_have_ended_when_none_of_them_listens(two: list[Neighbour]) -> None:
    store = two[0]._store
    assert all_ended(store, [])
    assert not all_ended(store, [0, 1])
    two[1]._listener.close()
    assert all_ended(store, [1])
    assert not all_ended(store, [1, 0])
    assert not all_ended(store, [1, 2]), "nobody knows where rank 2 is"


def test_a_process_that_does_nothing_is_there(two: list[Neighbour]) -> None:
    """Nobody takes the calls."""
    assert {two[0].lost() for _ in range(100)} == {""}


def test_a_host_that_does_not_answer_is_lost(two: list[Neighbour], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=TimeoutError))
    told = [two[0].lost() for _ in range(MAX_SILENCES)]
    assert told == [*[""] * (MAX_SILENCES - 1), "the host of rank 1 has not answered for 0 s"]


def test_an_answer_in_between_begins_the_count_anew(two: list[Neighbour], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=TimeoutError))
        assert {two[0].lost() for _ in range(MAX_SILENCES - 1)} == {""}
        monkeypatch.setattr(socket, "create_connection", REAL)
        assert two[0].lost() == ""


def test_who_was_never_reached_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("listens 1", "1 127.0.0.1")
    first = Neighbour(store, RankInfo(0, 2, 0))
    assert {first.lost() for _ in range(20)} == {""}


def test_without_an_address_nobody_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_info = RankInfo(0, 2, 0)
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_AGAIN, "try again")))
    assert watchdog._neighbour(dist.HashStore(), rank_info) is None
    monkeypatch.undo()
    monkeypatch.setenv(MEETING, "folder")
    assert watchdog._neighbour(dist.HashStore(), rank_info) is None, "the local launcher looks after its ranks"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("answers", [False, True], ids=["lost", "there all the same"])
def test_the_watchdog_calls_the_roll_for_a_lost_neighbour(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody is idle, no collective fails, and `train.timeout` is far away."""
    ended: list[str] = []
    told = threading.Event()

    def end(self: Watchdog, text: str, speaks: bool, part: Callable[[], None]) -> None:
        ended.append(text)
        told.set()
        raise SystemExit

    monkeypatch.setattr(watchdog, "EXIT_DELAY", 0.1)  # until all ranks know the verdict
    monkeypatch.setattr(watchdog, "between_looks", lambda timeout, ranks: 0.05)
    monkeypatch.setattr(Watchdog, "_end", end)
    keeper = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    hosts = dist.PrefixStore("host", keeper)
    infos = [RankInfo(rank, 2, rank) for rank in range(2)]
    for rank_info in infos:
        hosts.set(str(rank_info.rank), "node")
    meeting = Meeting(keeper, hosts, "node", "rank 0", 1)
    dogs = [Watchdog(meeting, rank_info, Activity(), 600.0) for rank_info in infos]
    for dog in dogs:
        dog.patience = 1.0
    assert dogs[0]._next is not None
    assert dogs[1]._next is not None
    while not dogs[0]._next._seen:
        time.sleep(0.01)
    if not answers:
        dogs[1].stop()
    dogs[1]._next._listener.close()
    if answers:
        deadline = time.monotonic() + 10
        while dogs[0]._next._seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not dogs[0]._next._seen, "the roll was called"
        dogs[1].stop()
    else:
        assert told.wait(20)
        assert ended[0].startswith(
            "the process of rank 1 has ended\n  rank 1 on node: no answer, lost\n  rank 0 on node"
        )
    dogs[0].stop()
    assert len(ended) == (not answers)
