"""The signals that ask programs for a stop, and how those that start ranks prepare their children."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SIGNAL_NAMES = ",".join(number.name[3:] for number in HANDLED_SIGNALS)  # as env and the shell call them
SET_PARENT_DEATH_SIGNAL = 1  # option of prctl(2): PR_SET_PDEATHSIG


class Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C has asked this program to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def stoppable() -> Iterator[None]:
    """Let signals that ask for a stop raise Stopped meanwhile, so that nothing is left behind; Ctrl-C does already.

    Ignored signals stay ignored, as SIGHUP under nohup. A program may take other handlers, which then stay.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler could be set
        yield
        return
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS if number != signal.SIGINT}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _stop:
                signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


def prepared(number: int) -> Callable[[], None]:
    """Return a function for `preexec_fn`, which prepares a child's signals before it becomes another program.

    The signals of `HANDLED_SIGNALS` wait until that program can hear them. On Linux, it gets the signal `number` when
    this process dies.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, number)
            if os.getppid() != parent:  # it has died before
                os.kill(os.getpid(), number)

    return prepare
