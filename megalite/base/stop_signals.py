"""The signals that ask a command to stop, and what they do before it is under way. Imports next to nothing."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from megalite.base.exit_codes import ExitCode

Handler = Callable[[int, FrameType | None], object] | int | None
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2)


def listen(handler: Handler, numbers: Iterable[int] = STOP_SIGNALS) -> dict[int, Handler]:
    """Handle signals, but for those that were ignored (as nohup does). Returns the handlers that they had before."""
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def end_at_once(
    interrupted: int = ExitCode.INTERRUPTED, last: Callable[[int], None] = lambda _: None
) -> dict[int, Handler]:
    """Let the signals of `STOP_SIGNALS` end this process with one line, at any moment. Returns the handlers before.

    last: called with the exit code, at last.

    The exit code is STOPPED, that of SIGINT `interrupted`. An exception would not do: modules that are being imported
    may lose it, or make another of it. Only the first of many ranks prints the line.
    """

    def end(number: int, _: FrameType | None) -> None:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            with suppress(OSError):
                os.write(2, f"megalite: stopped by {signal.Signals(number).name}\n".encode())
        code = interrupted if number == signal.SIGINT else ExitCode.STOPPED
        last(code)
        os._exit(code)

    before = listen(end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a batch script holds them up until there are handlers
    return before


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals of `STOP_SIGNALS` in this thread meanwhile; processes and threads that it starts inherit that.

    Another thread of this process may take a signal still, and the main thread then runs its handler.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def held_up() -> Iterator[None]:
    """Hold the signals of `STOP_SIGNALS` up meanwhile, whichever thread takes them; as `blocked` otherwise.

    They arrive at the end. In another thread than the main one there is nothing to hold up: no handler runs in it.
    """
    taken: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    with blocked():
        handlers = listen(lambda number, _: taken.append(number)) if main else {}
        try:
            yield
        finally:
            restore(handlers)
            for number in taken:  # still blocked, so that all of them get here
                signal.raise_signal(number)


@contextmanager
def ended_at_once(
    interrupted: int = ExitCode.INTERRUPTED, last: Callable[[int], None] = lambda _: None
) -> Iterator[None]:
    """Let signals end this process as `end_at_once` does, within the context."""
    before = end_at_once(interrupted, last)
    try:
        yield
    finally:
        restore(before)


class Stopped(KeyboardInterrupt):
    """A signal has asked this program to stop, which leaves nothing half-done behind. `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.STOPPED


def stop(number: int, _: FrameType | None) -> None:
    """A handler of signals. Raises Stopped."""
    raise Stopped(number)


def restore(handlers: dict[int, Handler]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
