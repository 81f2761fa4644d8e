"""A watchdog whose store is slow to answer. The rank is an object of this process."""

import threading

import pytest
import torch.distributed as dist

from megalite.distributed.health import watchdog
from megalite.distributed.health.activity import Activity
from megalite.distributed.health.rollcall import RollCall
from megalite.distributed.health.watchdog import Watchdog
from megalite.distributed.start.meeting import Meeting
from megalite.distributed.start.ranks import RankInfo


@pytest.mark.parametrize(("silence", "ends"), [(60.0, False), (0.3, True)])
def test_a_store_is_lost_when_it_is_silent_for_long(
    silence: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stalls for longer than a rank may take to answer a roll call ends no job."""
    ended: list[str] = []
    told, asked, answer = threading.Event(), threading.Event(), threading.Event()

    def end(self: Watchdog, text: str, speaks: bool, part: object) -> None:
        ended.append(text)
        told.set()

    def called(self: RollCall) -> bool:
        asked.set()
        assert answer.wait(20)
        return False

    monkeypatch.setattr(watchdog, "SILENCE", silence)
    monkeypatch.setattr(watchdog, "LAUNCHER_LEAD", 0.0)
    monkeypatch.setattr(watchdog, "DEPUTY_LEAD", 0.0)
    monkeypatch.setattr(watchdog, "between_looks", lambda timeout, ranks: 0.05)
    monkeypatch.setattr(Watchdog, "_end", end)
    monkeypatch.setattr(RollCall, "called", called)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dog = Watchdog(Meeting(store, store, "node", "the launcher", 0), RankInfo(0, 1, 0), Activity(), 600.0)
    dog.patience = 0.1
    assert asked.wait(20)
    assert told.wait(1.0) == ends
    answer.set()
    dog.stop()
    assert [text.splitlines()[0] for text in ended] == [
        "lost the job's key-value store, which the launcher kept: no answer for 0.3 s"
    ] * ends
