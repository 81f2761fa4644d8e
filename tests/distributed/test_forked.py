"""Forked processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from megalite.distributed.start.forked import Forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher forks on Linux alone")


@pytest.fixture
def sleeper() -> Iterator[Forked]:
    process = Forked(partial(time.sleep, 600))
    yield process
    process.kill()


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_told(code: int) -> None:
    process = Forked(partial(sys.exit, code))
    assert process.wait(60) == process.wait() == process.poll() == code
    process.send_signal(signal.SIGTERM)
    process.kill()


def test_waiting_has_an_end(sleeper: Forked) -> None:
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.01)


@pytest.mark.parametrize(
    ("end", "number"),
    [
        (Forked.terminate, signal.SIGTERM),
        (Forked.kill, signal.SIGKILL),
        (lambda process: process.send_signal(signal.SIGUSR1), signal.SIGUSR1),
    ],
)
def test_a_death_by_signal_is_told(end: Callable[[Forked], None], number: signal.Signals, sleeper: Forked) -> None:
    end(sleeper)
    assert sleeper.wait(60) == -number


def test_a_process_whose_exit_code_was_lost_can_be_killed_and_waited_for(sleeper: Forked) -> None:
    pid = sleeper._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    sleeper.terminate()
    sleeper.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait()
