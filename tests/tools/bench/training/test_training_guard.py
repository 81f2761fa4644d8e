"""Programs that hang, crash, print without end or take all memory: each is ended, and told for what it did."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite_tools.bench.training import guard
from megalite_tools.bench.training.guard import MARK, TAIL_BYTES, ProgramEnd, ProgramLimits, end_leftover, run_limited

QUICK = 0.5  # seconds to end on SIGINT


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "GRACE", QUICK)
    monkeypatch.setattr(guard, "PAUSE", 0.05)


def run(tmp_path: Path, code: str, seconds: float = 20, memory: float = float("inf")) -> ProgramEnd:
    command = [sys.executable, "-S", "-c", code]
    limits = ProgramLimits(seconds, memory)
    ended = run_limited(command, os.environ, limits, tmp_path / "running", tmp_path / "log")
    assert not (tmp_path / "running").exists()
    return ended


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_death(pid: int) -> None:
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} is alive"
        time.sleep(0.02)


def test_a_program_that_ends_well(tmp_path: Path) -> None:
    ended = run(tmp_path, "print('done'); print('more')")
    assert (ended.code, ended.broken, ended.tail) == (0, "", "done\nmore\n")
    assert (tmp_path / "log").read_text() == ended.tail


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
    ],
)
def test_a_program_that_crashes(tmp_path: Path, code: str, expected: int) -> None:
    ended = run(tmp_path, code)
    assert (ended.code, ended.broken) == (expected, "")


def test_a_program_that_hangs_may_end_well_on_the_first_signal(tmp_path: Path) -> None:
    code = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('report')"
    ended = run(tmp_path, code, seconds=0.5)
    assert (ended.broken, ended.tail) == ("time", "report\n")
    assert ended.seconds < 5


def test_a_program_that_hears_no_signal_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    """One child has a session of its own and has lost its parent, another has closed its output."""
    child = "import os, time; os.setsid(); print(os.getpid(), flush=True); os.fork() or os.close(1); time.sleep(60)"
    code = "import signal, subprocess, sys, time; signal.signal(2, signal.SIG_IGN)\n"
    code += f"subprocess.Popen([sys.executable, '-S', '-c', {child!r}])\n"
    code += "print(__import__('os').getpid(), flush=True); time.sleep(60)"
    ended = run(tmp_path, code, seconds=0.6)
    assert (ended.code, ended.broken) == (-signal.SIGKILL, "time")
    pids = [int(word) for word in ended.tail.split()]
    assert len(pids) == 2
    for pid in pids:
        wait_for_death(pid)


def test_a_child_that_holds_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    ended = run(tmp_path, code)
    assert (ended.code, ended.broken) == (0, "")
    assert ended.seconds < 10
    wait_for_death(int(ended.tail))


def test_a_program_that_prints_without_end_keeps_its_beginning_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_LOG_BYTES", 1000)
    code = "import os\nfor n in range(1000): os.write(1, b'x' * 100_000)\nos.write(1, b'the end')"  # 100 MB
    ended = run(tmp_path, code)
    assert ended.code == 0
    assert len(ended.tail) == TAIL_BYTES
    assert ended.tail.endswith("xthe end")
    assert (tmp_path / "log").read_text() == "x" * 1000


def test_a_program_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    code = (
        "import time\nheld = []\nfor n in range(200): held.append(bytearray(10 << 20)); time.sleep(.01)\ntime.sleep(60)"
    )
    ended = run(tmp_path, code, memory=200 << 20)
    assert (ended.code, ended.broken) == (-signal.SIGKILL, "memory")
    assert ended.peak > 200 << 20


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    ended = run_limited(["/nowhere/program"], os.environ, ProgramLimits(20), tmp_path / "running", tmp_path / "log")
    assert (ended.code, ended.tail) == (127, "/nowhere/program: cannot be started: No such file or directory\n")


@pytest.mark.parametrize("plant", ["link", "pipe", "folder"])
def test_what_is_planted_in_place_of_the_log_costs_the_log_alone(tmp_path: Path, plant: str) -> None:
    victim, log = tmp_path / "victim", tmp_path / "log"
    victim.write_text("precious")
    {"link": lambda: log.symlink_to(victim), "pipe": lambda: os.mkfifo(log), "folder": log.mkdir}[plant]()
    assert run(tmp_path, "print('x')").tail == "x\n"
    assert victim.read_text() == "precious"


def test_a_process_that_no_signal_ends_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that waits in a driver. Here signals are kept from it."""
    kill, killed = os.kill, []
    monkeypatch.setattr(guard.os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(guard.os, "killpg", lambda *_: None)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    ended = run(tmp_path, "import time; time.sleep(60)", seconds=0.3)
    assert (ended.broken, ended.code) == ("time", -signal.SIGKILL)
    assert 0.3 + 2 * QUICK < ended.seconds < 10
    kill(killed[0], signal.SIGKILL)


def test_what_a_killed_parent_has_left_is_ended_and_nothing_else(tmp_path: Path) -> None:
    mark = "0" * 32
    left, other = (
        subprocess.Popen(["sleep", "60"], start_new_session=True, env={MARK: each}) for each in (mark, "1" * 32)
    )
    try:
        leader = tmp_path / "running"
        for text in ("", "[]", "{}", '{"mark": 3}', '{"mark": ""}'):
            leader.write_text(text)
            assert not end_leftover(leader)
        assert not end_leftover(tmp_path / "missing")
        assert left.poll() is None
        leader.write_text(json.dumps({"mark": mark}))
        assert end_leftover(leader)
        assert left.wait(10) == -signal.SIGKILL
        assert other.poll() is None
        assert not end_leftover(leader)
    finally:
        for process in (left, other):
            process.kill()
            process.wait()
