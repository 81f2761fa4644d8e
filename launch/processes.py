"""What the programs that start ranks have in common: the signals that ask for a stop, and how children are prepared."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NAMES = ",".join(number.name[3:] for number in HEARD)  # as env and the shell call them
SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def prepared(number: int) -> Callable[[], None]:
    """What a child does before it becomes another program, for `preexec_fn`.

    The signals of `HEARD` wait until that program can hear them. On Linux, it gets the signal `number` when this
    process dies.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, number)
            if os.getppid() != parent:  # it has died before
                os.kill(os.getpid(), number)

    return prepare
