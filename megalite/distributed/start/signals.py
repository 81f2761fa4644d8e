"""Signals by which a rank hears, from its first moment on, of a stop and of its launcher's death. Imports no torch."""

import ctypes
import os
import signal
import sys

from megalite.base.exit_codes import ExitCode
from megalite.base.stop_signals import STOP_SIGNALS, listen
from megalite.distributed.start.failure_report import log, tell
from megalite.distributed.start.local import LAUNCHER, MEETING
from megalite.distributed.start.ranks import RankInfo


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies (Linux)."""
    launcher = os.environ.get(LAUNCHER)
    if sys.platform == "linux" and (launcher is not None or "TORCHELASTIC_RUN_ID" in os.environ):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if launcher is not None and os.getppid() != int(launcher):  # it has died before
            os.kill(os.getpid(), signal.SIGKILL)


def end_when_stopped(rank_info: RankInfo, when: str = "", interrupted: int = ExitCode.INTERRUPTED) -> None:
    """End this rank as soon as it is asked to stop: with exit code STOPPED, or `interrupted` after SIGINT.

    The other ranks are asked as well. So only rank 0 prints a message, unless our own launcher picks the rank that
    speaks. when: added to that message.
    """

    def stop(number: int, frame: object) -> None:
        text = f"stopped by {signal.Signals(number).name}{when}"
        code = interrupted if number == signal.SIGINT else ExitCode.STOPPED
        log.error(text)
        if rank_info.rank == 0 or MEETING in os.environ:
            tell(code, text, rank_info)
            sys.stderr.flush()
        os._exit(code)

    listen(stop)
    hear()


def hear() -> None:
    """Unblock the signals of `STOP_SIGNALS`. The local launcher starts ranks with them blocked: none is too early."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore_stops() -> None:
    """Ignore stop signals: the run is over."""
    listen(signal.SIG_IGN)
