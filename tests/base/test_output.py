"""Outputs that fail: closed, full, without a reader, or with one who sleeps."""

import errno
import logging
import os
import pty
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megalite.base import output
from megalite.base.output import LogFile, Lost, Outlet, append, give_up, stream

Failures = list[tuple[str, Exception]]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process can become larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def full() -> Iterator[int]:
    number = os.open("/dev/full", os.O_WRONLY)
    yield number
    os.close(number)


@contextmanager
def without_reader() -> Iterator[int]:
    reads, writes = os.pipe()
    os.close(reads)
    yield writes
    os.close(writes)


@contextmanager
def closed() -> Iterator[int]:
    """What a stream gets that was closed at the start: a file that is open for reading."""
    number = os.open(os.devnull, os.O_RDONLY)
    yield number
    os.close(number)


@contextmanager
def hung_up() -> Iterator[int]:
    """A terminal whose window was closed."""
    window, terminal = pty.openpty()
    os.close(window)
    yield terminal
    os.close(terminal)


@pytest.mark.parametrize(
    ("outlet", "number"),
    [(full, errno.ENOSPC), (without_reader, errno.EPIPE), (closed, errno.EBADF), (hung_up, errno.EIO)],
)
def test_a_lost_stream_is_answered_once_and_never_raises(outlet: Callable[[], Iterator[int]], number: int) -> None:
    failures: Failures = []
    with outlet() as descriptor:  # type: ignore[attr-defined]
        lost = stream(descriptor, Outlet("stdout", lambda *failure: failures.append(failure)), None)
        for _ in range(3):
            print("words" * 5000, file=lost, flush=True)
    ((name, error),) = failures
    assert name == "stdout"
    assert isinstance(error, OSError)
    assert error.errno == number


@pytest.mark.parametrize(
    ("outlet", "code", "text"), [(full, 2, "out: No space left on device"), (without_reader, 141, "")]
)
def test_a_command_that_loses_its_stdout_ends(outlet: Callable[[], Iterator[int]], code: int, text: str) -> None:
    with outlet() as descriptor:  # type: ignore[attr-defined]
        lost = stream(descriptor, Outlet("out", give_up), None)
        with pytest.raises(Lost) as caught:
            print("words", file=lost, flush=True)
        assert (caught.value.code, str(caught.value)) == (code, text)
        lost.flush()  # as at exit: nothing is left to fail


def test_a_reader_who_sleeps_is_waited_for_a_while_and_gets_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.01)
    failures: Failures = []
    reads, writes = os.pipe()
    asleep = stream(writes, Outlet("stdout", lambda *failure: failures.append(failure)), None)
    for _ in range(3):
        print("x" * 2**16, file=asleep, flush=True)
    ((_, error),) = failures
    assert isinstance(error, BlockingIOError)
    os.read(reads, 2**20)  # all that a pipe holds
    print("awake", file=asleep, flush=True)
    assert os.read(reads, 100) == b"awake\n"
    os.close(reads)
    os.close(writes)


def test_a_stream_carries_everything_in_order(tmp_path: Path) -> None:
    text = "".join(f"line {number} é \udc80\n" for number in range(3000))
    with (tmp_path / "out").open("wb") as file:
        print(text, end="", file=stream(file.fileno(), Outlet("stdout", give_up), None), flush=True)
    assert (tmp_path / "out").read_text() == text.replace("\udc80", "\\udc80")


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    append(path, b"first\n")
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        append(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    append(path, b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match="is no regular file"):  # nobody reads it
        append(path, b"first\n")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="is no regular file"):
        append(path, b"second\n")
    os.close(reader)


def test_a_loss_is_told_again_after_it_was_over() -> None:
    failures: Failures = []
    outlet = Outlet("disk", lambda *failure: failures.append(failure))
    for fails in (True, True, False, True):
        with outlet:
            if fails:
                raise OSError(errno.ENOSPC, "full")
    assert len(failures) == 2


def test_a_bug_is_not_taken_for_a_lost_output() -> None:
    with pytest.raises(KeyError), Outlet("disk"):
        raise KeyError("bug")


def test_a_log_on_a_full_disk_is_told_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("megalite")
    handler = LogFile(tmp_path / "log")
    log.addHandler(handler)
    try:
        log.warning("before")
        with file_size_limit(10):
            log.warning("lost")
            log.warning("lost")
        log.warning("after")
    finally:
        log.removeHandler(handler)
    assert (tmp_path / "log").read_text().splitlines() == ["before", "after"]
    assert capsys.readouterr().err == (
        f"megalite: warning: {tmp_path / 'log'}: File too large; the run goes on without it\n"
    )


@pytest.mark.parametrize(
    ("arguments", "redirection", "code", "told"),
    [
        ("show", ">/dev/full", 2, "megalite: error: stdout: No space left on device\n"),
        ("--help", ">&-", 2, "megalite: error: stdout: Bad file descriptor\n"),
        ("show", "2>&-", 0, ""),
        ("--help", ">/dev/full 2>&-", 2, ""),
    ],
)
def test_commands_end_in_one_line(arguments: str, redirection: str, code: int, told: str) -> None:
    command = f"exec '{sys.executable}' -m megalite.commands.main {arguments} {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, told)


@pytest.mark.parametrize("triton", [False, True])
def test_no_library_speaks_after_a_command_that_has_used_triton(triton: bool) -> None:
    """From 3.9 on, Triton's bindings list what they still hold when Python has ended. A command's own words stay."""
    program = f"""
import os, sys
from megalite.base.output import give_up, standard_streams
class Library:
    def __del__(self, write=os.write):
        write(2, b"leaked\\n")
held = Library()
standard_streams(give_up)
if {triton}:
    sys.modules["triton"] = sys
print("told", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ("told\n" if triton else "told\nleaked\n")
