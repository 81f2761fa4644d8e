import re
import time

import pytest
import torch.distributed as dist

from megalite.distributed.health.rollcall import MAX_ROWS, RollCall, Status, table


def status(rank: int, what: str = "reading a batch", ago: float = 9.0, host: str = "node", idle: float = 9.0) -> Status:
    return Status(rank, host, 3, what, time.time() - ago, idle, "megalite/data/loader.py:1 read")


def hold(answers: list[Status], size: int, cause: str = "", timeout: float = 8.0) -> tuple[RollCall, dist.Store]:
    """A round of `size` ranks of which some answer."""
    store, hosts = dist.HashStore(), dist.HashStore()
    for rank in range(size):
        hosts.set(str(rank), f"host{rank // 2}")
    call = RollCall(store, size, 0)
    assert not call.called()
    call.call(cause)
    assert call.called()
    firsts = [call.answer(answer) for answer in answers]
    assert firsts == [True] + [False] * (len(answers) - 1)
    return call, hosts


def test_ranks_that_do_the_same_share_a_line_and_who_is_longest_at_it_comes_first() -> None:
    answers = [status(rank, ago=5) for rank in (0, 1, 2, 5)] + [status(3, "F", ago=7), status(4, ago=5, host="other")]
    assert table(answers, {}).splitlines() == [
        "  rank 3 on node: step 3, F, for 7 s, at megalite/data/loader.py:1 read",
        "  5 ranks (0-2, 4-5): step 3, reading a batch, for 5 s, at megalite/data/loader.py:1 read",
    ]


def test_lost_ranks_come_first_by_host() -> None:
    found = table([status(0)], {1: "a", 2: "b", 3: "b"}).splitlines()
    assert found[:2] == ["  rank 1 on a: no answer, lost", "  2 ranks (2-3) on b: no answer, lost"]
    assert len(found) == 3


def test_a_large_job_has_a_short_table() -> None:
    answers = [status(rank, f"F(stage {rank // 512})" if rank % 512 else f"doing {rank}") for rank in range(16384)]
    lines = table(answers, {}).splitlines()
    assert len(lines) == MAX_ROWS + 1
    assert lines[-1] == "  and 48 more such lines; every rank's log has its own"
    assert all(len(line) < 200 for line in lines)
    scattered = table([status(rank) for rank in range(0, 16384, 2)], {})
    assert "8192 ranks (0, 2, 4, 6, 8, 10, …) on node" in scattered


def test_nobody_getting_on_is_fatal_and_names_who_is_lost() -> None:
    call, hosts = hold([status(1), status(3, idle=6)], size=4)
    assert not call.complete()
    assert call.verdict() is None
    verdict = call.conclude(8.0, hosts)
    assert verdict == call.verdict()
    assert (verdict.fatal, verdict.idle, verdict.speaker, verdict.answers) == (True, 6, 1, 2)
    head, *lines = verdict.text.splitlines()
    assert head == "no progress for 8 s (train.timeout)"
    assert lines[:2] == ["  rank 0 on host0: no answer, lost", "  rank 2 on host1: no answer, lost"]


def test_a_rank_that_gets_on_is_waited_for() -> None:
    call, hosts = hold([status(1), status(0, "saving", idle=0.5)], size=2)
    assert call.complete()
    verdict = call.conclude(8.0, hosts)
    assert not verdict.fatal
    assert verdict.idle == 0.5


@pytest.mark.parametrize("present", [2, 3])
def test_a_doubt_is_fatal_only_if_somebody_does_not_answer(present: int) -> None:
    store, hosts = dist.HashStore(), dist.HashStore()
    for rank in range(3):
        hosts.set(str(rank), "node")
    call = RollCall(store, 3, 0)
    call.call("", "the process of rank 2 has ended")
    for rank in range(present):
        call.answer(status(rank, idle=0.0))
    verdict = call.conclude(600.0, hosts)
    assert verdict.fatal == (present == 2)
    assert verdict.text.startswith("the process of rank 2 has ended")
    call.call("rank 1 has lost a peer")
    assert call.conclude(600.0, hosts).fatal, "whoever knows more is heard"


def test_a_lost_peer_is_fatal_even_if_somebody_is_busy() -> None:
    call, hosts = hold([status(0, idle=0.0), status(1, idle=0.0)], size=3, cause="rank 1 has lost a peer: gone")
    call.call("rank 0 has lost another")
    verdict = call.conclude(8.0, hosts)
    assert verdict.fatal
    assert re.match(r"rank 1 has lost a peer: gone\n  rank 2 on host1: no answer, lost\n", verdict.text)


def test_rounds_do_not_meet() -> None:
    store = dist.HashStore()
    first, second = RollCall(store, 1, 0), RollCall(store, 1, 1)
    first.call("")
    assert first.answer(status(0))
    assert not second.called()
    assert second.answer(status(0))
    assert (first.know(), first.known(), second.known()) == (1, 1, 0)


@pytest.mark.parametrize("cause", ["", "a cause"])
def test_the_first_cause_stays(cause: str) -> None:
    call, hosts = hold([status(0)], size=1, cause=cause)
    call.call("later")
    assert call.conclude(8.0, hosts).text.startswith(cause or "later")
