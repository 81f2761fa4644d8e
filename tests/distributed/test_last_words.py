"""How a failing rank's report is written where that may hang."""

import _thread
import time

import pytest

from megalite.distributed.start import failure_report


def test_a_report_is_written_before_the_rank_goes_on() -> None:
    written = []
    failure_report.briefly(lambda: time.sleep(0.05) or written.append(1))
    assert written == [1]


@pytest.mark.parametrize("fault", ["refuses", "hangs", "does not begin", "no more threads"])
def test_whatever_happens_to_the_report_the_rank_goes_on(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "PATIENCE", 0.05)
    monkeypatch.setattr(failure_report, "THREAD_START_SECONDS", 0.05)
    written = []

    def write() -> None:
        written.append(1)
        if fault == "refuses":
            raise OSError("read-only file system")
        if fault == "hangs":
            time.sleep(30)

    def start(*_: object) -> None:
        if fault == "no more threads":
            raise RuntimeError("can't start new thread")

    if fault in ("does not begin", "no more threads"):  # the former: for want of memory, it ends before its first line
        monkeypatch.setattr(_thread, "start_new_thread", start)
    failure_report.briefly(write)
    assert written == [1]
