"""Outputs that may fail: a standard stream that nobody reads, a file on a disk that is full."""

import atexit
import errno
import io
import logging
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megalite.base.exit_codes import ExitCode
from megalite_launch.base.files import appended
from megalite_launch.base.texts import escaped

PATIENCE = 5.0  # seconds that a run waits for a reader who does not read
UNBOUNDED_WIDTH = 10_000  # columns: a file or a pipe has no right edge to wrap at

log = logging.getLogger("megalite")


class Lost(Exception):
    """Standard output does not take what a command has to say. `code` is the exit code; no text: the reader left."""

    def __init__(self, name: str, error: Exception) -> None:
        left = isinstance(error, BrokenPipeError)
        self.code = ExitCode.READER_LEFT if left else ExitCode.BAD_INPUT
        super().__init__("" if left else f"{name}: {_reason(error)}")


def warn(text: str) -> None:
    """Tell the log and the user."""
    log.warning(text)
    print(f"megalite: warning: {escaped(text)}", file=sys.stderr)


def go_on(name: str, error: Exception) -> None:
    """Say that an output is lost."""
    warn(f"{name}: {_reason(error)}; the run goes on without it")


def give_up(name: str, error: Exception) -> None:
    """Raises Lost."""
    raise Lost(name, error)


class Outlet:
    """Guards an output: what fails in a `with` of it is passed over, and answered when it fails first.

    After something has worked, the next failure is the first again. failures: what an output raises.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[str, Exception], None] = go_on,
        failures: type[Exception] | tuple[type[Exception], ...] = OSError,
    ) -> None:
        self.name, self.answer, self.failures = name, answer, failures
        self.lost = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        before, self.lost = self.lost, isinstance(error, self.failures)
        if isinstance(error, self.failures) and not before:
            self.answer(self.name, error)
        if before and not self.lost:
            log.info("%s works again", self.name)
        return self.lost


def standard_streams(answer: Callable[[str, Exception], None]) -> None:
    """Let what is written to stdout and stderr fail in no other way than `answer` says, on stderr not at all.

    A stream that somebody has put in the place of one is left alone.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: no other file may get its number; what is written to this one fails
            os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = stream(1, Outlet("stdout", answer), sys.stdout)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = stream(2, Outlet("stderr"), sys.stderr)  # type: ignore[misc]
    atexit.register(_end_quietly)  # the first to be registered runs last


def _end_quietly() -> None:
    """Close stderr before Triton, from 3.9 on, fills it with a list of Python objects that its library still holds."""
    if "triton" in sys.modules:
        sys.stderr.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)


def stream(number: int, outlet: Outlet, old: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """Make a stream that writes to the file descriptor `number` as `old` does, and fails only as `outlet` says."""
    at_once = number == 2 or (old is not None and (old.line_buffering or old.write_through))
    return io.TextIOWrapper(
        _Standard(number, outlet),  # not buffered twice, so that one write may lead to another
        encoding=old.encoding if old else None,
        errors="backslashreplace",  # a character that a terminal does not know is no reason to end
        line_buffering=at_once,
    )


def append(path: Path, record: bytes) -> None:
    """Add a whole record to the end of a file, or nothing. Raises OSError.

    The file is opened each time, so that it does not matter what has become of it meanwhile. A link is refused, and a
    pipe: one that nobody reads would be waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with appended(path) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while record:
                record = record[file.write(record) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise


class LogFile(logging.Handler):
    """Writes a rank's log."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.outlet = path, Outlet(str(path))

    def emit(self, record: logging.LogRecord) -> None:
        with self.outlet:
            append(self.path, f"{escaped(self.format(record))}\n".encode(errors="backslashreplace"))


class _Standard(io.FileIO):
    """A file descriptor that the process was started with. Its reader may be gone, or asleep."""

    def __init__(self, number: int, outlet: Outlet) -> None:
        super().__init__(number, "w", closefd=False)
        self.outlet = outlet

    def write(self, data: Any) -> int:
        left = memoryview(data)
        with self.outlet:
            while left:
                self._wait()
                left = left[super().write(left[: select.PIPE_BUF]) or 0 :]  # as much as surely finds room at once
        return len(data)

    def _wait(self) -> None:
        """Wait until it can be written to. Raises BlockingIOError after a while, where a run has to go on."""
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        patience = 0.0 if self.outlet.lost else PATIENCE
        if not poll.poll(None if self.outlet.answer is give_up else 1000 * patience):
            raise BlockingIOError(errno.EAGAIN, "nobody reads it")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
