import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megalite.dist import local
from megalite.dist.local import launch, log_file

Program = Callable[[str], str]
LAUNCHER = """\
import sys
from pathlib import Path
from megalite.dist.local import launch
folder = Path(sys.argv[1])
try:
    sys.exit(launch("program", [str(folder)], 2, folder / "logs"))
except KeyboardInterrupt:
    sys.exit(130)
"""


def run(module: str, world_size: int, folder: Path, *arguments: str) -> int:
    return launch(module, [str(folder), *arguments], world_size, folder / "logs")


@contextmanager
def launcher_of_two(folder: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of two ranks, in a process of its own."""
    command = [sys.executable, "-c", LAUNCHER, str(folder)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_rank_knows_its_place_and_the_arguments(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = program("print(rank, world_size, os.environ['LOCAL_RANK'], sys.argv[2:])")
    assert run(module, 3, tmp_path, "a=1", "b c") == 0
    assert capfd.readouterr() == ("0 3 0 ['a=1', 'b c']\n", "")
    for rank in (1, 2):
        assert log_file(tmp_path / "logs", rank).read_text() == f"{rank} 3 {rank} ['a=1', 'b c']\n"
    assert not log_file(tmp_path / "logs", 0).exists()


def test_logs_of_an_earlier_run_are_kept(program: Program, tmp_path: Path) -> None:
    module = program("print('hello')")
    assert [run(module, 2, tmp_path), run(module, 2, tmp_path)] == [0, 0]
    assert log_file(tmp_path / "logs", 1).read_text() == "hello\nhello\n"


def test_the_launcher_s_signal_handlers_are_restored(program: Program, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in local.STOP], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert run(program("sys.exit(rank)"), 2, tmp_path) == 1
    assert ([signal.getsignal(number) for number in local.STOP], signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_a_rank_that_fails_ends_the_job(program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = program("""
        if rank == 1:
            raise ValueError("boom")
        time.sleep(600)
    """)
    assert run(module, 3, tmp_path) == 1
    log = log_file(tmp_path / "logs", 1)
    assert capfd.readouterr() == ("", f"megalite: rank 1 failed; see {log}\n")
    assert log.read_text().endswith("ValueError: boom\n")


def test_ranks_that_refuse_to_end_are_killed(program: Program, tmp_path: Path) -> None:
    module = program("""
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / "deaf").touch()
            time.sleep(600)
        wait_for("deaf")
        sys.exit(7)
    """)
    assert run(module, 2, tmp_path) == 7


def test_a_rank_that_cannot_be_started_leaves_none_behind(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, spawn = [], local._spawn

    def spawn_one(module: str, arguments: Sequence[str], rank: int, *rest: Any) -> subprocess.Popen[bytes]:
        if rank == 1:
            raise OSError("no more processes")
        started.append(spawn(module, arguments, rank, *rest))
        return started[0]

    monkeypatch.setattr(local, "_spawn", spawn_one)
    with pytest.raises(OSError, match="no more processes"):
        run(program("time.sleep(600)"), 2, tmp_path)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_the_cause_is_shown_and_not_what_followed_from_it(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = program("""
        import json
        from megalite.dist.local import MEETING, error_file

        codes = {0: 5, 1: 1, 2: 1}  # rank 0 misses a peer, and says so first; rank 1 fails before rank 2
        report = {"time": float(rank), "rank": rank, "code": codes[rank], "error": f"error of rank {rank}"}
        error_file(Path(os.environ[MEETING]), rank).write_text(json.dumps(report))
        (folder / str(rank)).touch()
        wait_for("0", "1", "2")
        sys.exit(codes[rank])
    """)
    assert run(module, 3, tmp_path) == 1
    assert capfd.readouterr() == ("", "megalite: rank 1: error of rank 1\n")


@pytest.mark.parametrize(("name", "hint"), [("SIGKILL", "; the machine may be out of memory"), ("SIGSEGV", "")])
def test_a_rank_killed_by_a_signal_is_named(
    name: str, hint: str, program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = program(f"""
        if rank == 1:
            os.kill(os.getpid(), signal.{name})
        time.sleep(600)
    """)
    assert run(module, 2, tmp_path) == 5
    log = log_file(tmp_path / "logs", 1)
    assert capfd.readouterr().err == f"megalite: rank 1 was killed by {name}{hint}; see {log}\n"


@pytest.mark.parametrize("number", local.STOP)
def test_a_signal_to_the_launcher_reaches_the_ranks(number: signal.Signals, program: Program, tmp_path: Path) -> None:
    program("""
        def stop(number, frame):
            (folder / f"stopped {rank}").write_text(str(int(number)))
            wait_for("stopped 0", "stopped 1")
            sys.exit(3)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, stop)
        (folder / f"ready {rank}").touch()
        time.sleep(600)
    """)
    with launcher_of_two(tmp_path) as launcher:
        wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in (0, 1)))
        launcher.send_signal(number)
        assert launcher.wait(60) == 3
    assert [(tmp_path / f"stopped {rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2


def test_ranks_start_with_signals_held_up(program: Program, tmp_path: Path) -> None:
    module = program("")
    (tmp_path / "program.py").write_text(
        "import signal, sys\nfrom megalite.dist.local import STOP\n"
        "sys.exit(0 if signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(STOP) else 1)"
    )
    assert run(module, 1, tmp_path) == 0


def test_the_terminal_s_ctrl_c_reaches_a_rank_once(program: Program, tmp_path: Path) -> None:
    program("""
        def stop(number, frame):
            with (folder / f"interrupts {rank}").open("a") as file:
                file.write("x")

        signal.signal(signal.SIGINT, stop)
        (folder / f"ready {rank}").touch()
        wait_for("enough")
        sys.exit(3)
    """)
    with launcher_of_two(tmp_path, start_new_session=True) as launcher:
        wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in (0, 1)))
        os.killpg(launcher.pid, signal.SIGINT)
        files = [tmp_path / f"interrupts {rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() for file in files))
        (tmp_path / "enough").touch()
        assert launcher.wait(60) == 3
    assert [file.read_text() for file in files] == ["x", "x"]


def test_a_second_interrupt_ends_everything_at_once(program: Program, tmp_path: Path) -> None:
    program("""
        def stop(number, frame):
            (folder / f"pid {rank}").write_text(str(os.getpid()))

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, stop)
        (folder / f"ready {rank}").touch()
        while True:
            time.sleep(600)
    """)
    with launcher_of_two(tmp_path) as launcher:
        wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in (0, 1)))
        launcher.send_signal(signal.SIGINT)
        files = [tmp_path / f"pid {rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        assert launcher.poll() is None, "ranks have as long as they want to obey"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130
        assert not any(running(file.read_text()) for file in files)


def running(pid: str) -> bool:
    """Whether a process is there and is not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's parent-death signal")
def test_no_rank_outlives_a_launcher_that_is_killed(program: Program, tmp_path: Path) -> None:
    program("""
        from megalite.dist.ranks import find_place
        from megalite.dist.start import run_rank

        def main():
            (folder / f"partial {rank}").write_text(str(os.getpid()))
            (folder / f"partial {rank}").rename(folder / f"pid {rank}")
            time.sleep(600)

        run_rank(main, find_place())
    """)
    files = [tmp_path / f"pid {rank}" for rank in (0, 1)]
    with launcher_of_two(tmp_path) as launcher:
        wait_until(lambda: all(file.exists() for file in files))
        pids = [file.read_text() for file in files]
        assert all(map(running, pids))
        launcher.kill()
    wait_until(lambda: not any(map(running, pids)))
