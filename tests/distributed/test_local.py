import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.base.errors import InputError
from megalite.base.stop_signals import STOP_SIGNALS
from megalite.distributed.start import local
from megalite.distributed.start.local import launch, log_file

Program = Callable[[str], str]
LAUNCHER = """\
import sys
from pathlib import Path
from megalite.distributed.start.local import launch
folder, world_size, shared, *arguments = sys.argv[1:]
try:
    sys.exit(launch("program", [folder, *arguments], int(world_size), Path(folder) / "logs", shared or None))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(params=["", "json"], ids=["spawned", "forked"])
def shared(request: pytest.FixtureRequest) -> str:
    """A module whose import the ranks share, if any."""
    if request.param and sys.platform != "linux":
        pytest.skip("ranks are forked on Linux alone")
    return str(request.param)


@contextmanager
def launcher(
    folder: Path, shared: str, *arguments: str, world_size: int = 2, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of `program`, in a process of its own."""
    command = [sys.executable, "-c", LAUNCHER, str(folder), str(world_size), shared, *arguments]
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run(folder: Path, shared: str, *arguments: str, world_size: int = 2) -> int:
    with launcher(folder, shared, *arguments, world_size=world_size) as process:
        return process.wait(60)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_rank_knows_its_number_and_the_arguments(
    program: Program, shared: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program("print(rank, world_size, os.environ['LOCAL_RANK'], sys.argv[2:], os.read(0, 9))")
    (tmp_path / "input").write_text("typed")
    with (
        (tmp_path / "input").open() as file,
        launcher(tmp_path, shared, "a=1", "b c", world_size=3, stdin=file) as process,
    ):
        assert process.wait(60) == 0
    assert capfd.readouterr() == ("0 3 0 ['a=1', 'b c'] b''\n", "")
    for rank in (1, 2):
        assert log_file(tmp_path / "logs", rank).read_text() == f"{rank} 3 {rank} ['a=1', 'b c'] b''\n"
    assert not log_file(tmp_path / "logs", 0).exists()


def test_logs_of_an_earlier_run_are_kept(program: Program, shared: str, tmp_path: Path) -> None:
    program("print('hello')")
    assert [run(tmp_path, shared), run(tmp_path, shared)] == [0, 0]
    assert log_file(tmp_path / "logs", 1).read_text() == "hello\nhello\n"


def test_the_launcher_s_signal_handlers_are_restored(program: Program, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert launch(program("sys.exit(rank)"), [str(tmp_path)], 2, tmp_path / "logs") == 1
    assert (
        [signal.getsignal(number) for number in STOP_SIGNALS],
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ) == before


def test_a_rank_that_fails_ends_the_job(
    program: Program, shared: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program("""
        if rank == 1:
            raise ValueError("boom")
        time.sleep(600)
    """)
    assert run(tmp_path, shared, world_size=3) == 1
    log = log_file(tmp_path / "logs", 1)
    assert capfd.readouterr() == ("", f"megalite: rank 1 failed; see {log}\n")
    assert log.read_text().endswith("ValueError: boom\n")


def test_ranks_that_refuse_to_end_are_killed(program: Program, shared: str, tmp_path: Path) -> None:
    program("""
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / "deaf").touch()
            time.sleep(600)
        wait_for("deaf")
        sys.exit(7)
    """)
    assert run(tmp_path, shared) == 7


def test_a_rank_that_cannot_be_started_leaves_none_behind(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, spawn = [], local._spawn

    def spawn_one(*arguments: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        started.append(spawn(*arguments))
        return started[0]

    monkeypatch.setattr(local, "_spawn", spawn_one)
    with pytest.raises(
        InputError, match=r"only 1 of 2 ranks could be started: no more processes; use .* \(ulimit -u\)"
    ):
        launch(program("time.sleep(600)"), [str(tmp_path)], 2, tmp_path / "logs")
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_more_ranks_than_memory_are_refused_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_spawn", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(InputError, match=r"16,777,216 ranks need 640 TiB"):
        launch("program", [], 1 << 24, tmp_path)


def test_a_missing_folder_for_temporary_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"no temporary folder can be made: No such file.*; set TMPDIR"):
        launch("program", [], 1, tmp_path)


def test_the_cause_is_shown_and_not_what_followed_from_it(
    program: Program, shared: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program("""
        import json
        from megalite.distributed.start.local import MEETING, error_file

        codes = {0: 5, 1: 1, 2: 1}  # rank 0 misses a peer, and says so first; rank 1 fails before rank 2
        report = {"time": float(rank), "rank": rank, "code": codes[rank], "error": f"error of rank {rank}"}
        error_file(Path(os.environ[MEETING]), rank).write_text(json.dumps(report))
        (folder / str(rank)).touch()
        wait_for("0", "1", "2")
        sys.exit(codes[rank])
    """)
    assert run(tmp_path, shared, world_size=3) == 1
    assert capfd.readouterr() == ("", "megalite: rank 1: error of rank 1\n")


@pytest.mark.parametrize(("name", "hint"), [("SIGKILL", "; the machine may be out of memory"), ("SIGSEGV", "")])
def test_a_rank_killed_by_a_signal_is_named(
    name: str, hint: str, program: Program, shared: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program(f"""
        if rank == 1:
            os.kill(os.getpid(), signal.{name})
        time.sleep(600)
    """)
    assert run(tmp_path, shared) == 5
    log = log_file(tmp_path / "logs", 1)
    assert capfd.readouterr().err == f"megalite: rank 1 was killed by {name}{hint}; see {log}\n"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_the_launcher_reaches_the_ranks(
    number: signal.Signals, program: Program, shared: str, tmp_path: Path
) -> None:
    program("""
        def stop(number, frame):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent once the other rank has ended
            (folder / f"stopped {rank}").write_text(str(int(number)))
            wait_for("stopped 0", "stopped 1")
            sys.exit(3)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, stop)
        (folder / f"ready {rank}").touch()
        wait_for("never")  # in short sleeps: a signal that comes just before a sleep is heard only after it
    """)
    with launcher(tmp_path, shared) as process:
        wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in (0, 1)))
        process.send_signal(number)
        assert process.wait(60) == 3
    assert [(tmp_path / f"stopped {rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2


def test_ranks_start_with_signals_held_up_and_without_handlers(program: Program, shared: str, tmp_path: Path) -> None:
    program("")
    (tmp_path / "program.py").write_text(
        "import signal, sys\nfrom megalite.base.stop_signals import STOP_SIGNALS\n"
        "held_up = signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(STOP_SIGNALS)\n"
        "defaults = {signal.SIG_DFL, signal.default_int_handler}\n"
        "sys.exit(0 if held_up and {signal.getsignal(number) for number in STOP_SIGNALS} == defaults else 1)"
    )
    assert run(tmp_path, shared, world_size=1) == 0


def test_exit_codes_reach_a_launcher_whose_parent_ignores_children(
    program: Program, shared: str, tmp_path: Path
) -> None:
    program("sys.exit(7 * rank)")
    ignore = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    with launcher(tmp_path, shared, preexec_fn=ignore) as process:
        assert process.wait(60) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_what_ranks_share_is_imported_once(program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program("import common")
    (tmp_path / "common.py").write_text("import os\nprint('for', os.environ.get('RANK', 'all'))")
    assert run(tmp_path, "common", world_size=3) == 0
    assert capfd.readouterr().out == "for all\n"
    assert [log_file(tmp_path / "logs", rank).read_text() for rank in (1, 2)] == ["", ""]
    assert run(tmp_path, "", world_size=3) == 0
    assert capfd.readouterr().out == "for 0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_what_goes_on_beside_the_import_ends_before_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    @contextmanager
    def importing() -> Iterator[None]:
        order.append("begin")
        yield
        order.append("end")

    def fork(*_: object) -> SimpleNamespace:
        order.append("fork")
        return SimpleNamespace(poll=lambda: 0, wait=lambda *_: 0, kill=lambda: None)

    monkeypatch.setattr(local, "import_for_good", order.append)
    monkeypatch.setattr(local, "_fork", fork)
    assert launch("program", [], 1, tmp_path, "common", importing()) == 0
    assert order == ["begin", "common", "end", "fork"]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
@pytest.mark.parametrize(("wanted", "threads"), [(None, max(1, (os.cpu_count() or 1) // 3)), ("2", 2)])
def test_forked_ranks_divide_the_cores_unless_told_otherwise(
    wanted: str | None,
    threads: int,
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program("import torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])")
    if wanted is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert run(tmp_path, "torch", world_size=3) == 0
    assert capfd.readouterr().out == f"{threads} {threads}\n"


def test_the_terminal_s_ctrl_c_reaches_a_rank_once(program: Program, shared: str, tmp_path: Path) -> None:
    program("""
        def stop(number, frame):
            with (folder / f"interrupts {rank}").open("a") as file:
                file.write("x")

        signal.signal(signal.SIGINT, stop)
        (folder / f"ready {rank}").touch()
        wait_for("enough")
        sys.exit(3)
    """)
    with launcher(tmp_path, shared, start_new_session=True) as process:
        wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in (0, 1)))
        os.killpg(process.pid, signal.SIGINT)
        files = [tmp_path / f"interrupts {rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() for file in files))
        (tmp_path / "enough").touch()
        assert process.wait(60) == 3
    assert [file.read_text() for file in files] == ["x", "x"]


def test_a_second_interrupt_ends_everything_at_once(program: Program, shared: str, tmp_path: Path) -> None:
    program("""
        def stop(number, frame):
            (folder / f"pid {rank}").write_text(str(os.getpid()))

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, stop)
        (folder / f"ready {rank}").touch()
        wait_for("never")  # in short sleeps: a signal that comes just before a sleep is heard only after it
    """)
    with launcher(tmp_path, shared) as process:
        wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in (0, 1)))
        process.send_signal(signal.SIGINT)
        files = [tmp_path / f"pid {rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        assert process.poll() is None, "ranks have as long as they want to obey"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not any(running(file.read_text()) for file in files)


def running(pid: str) -> bool:
    """Whether a process is there and is not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's parent-death signal")
def test_no_rank_outlives_a_launcher_that_is_killed(program: Program, shared: str, tmp_path: Path) -> None:
    program("""
        from megalite.distributed.start.ranks import find_rank_info
        from megalite.distributed.start.start import run_rank

        def main():
            (folder / f"partial {rank}").write_text(str(os.getpid()))
            (folder / f"partial {rank}").rename(folder / f"pid {rank}")
            time.sleep(600)

        run_rank(main, find_rank_info())
    """)
    files = [tmp_path / f"pid {rank}" for rank in (0, 1)]
    with launcher(tmp_path, shared) as process:
        wait_until(lambda: all(file.exists() for file in files))
        pids = [file.read_text() for file in files]
        assert all(map(running, pids))
        process.kill()
    wait_until(lambda: not any(map(running, pids)))
