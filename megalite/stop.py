"""The signals that ask a command to stop, and what they do before it is under way. Imports next to nothing."""

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def listen(handler: Handler, numbers: Iterable[int] = STOP) -> dict[int, Handler]:
    """Have signals handled, but for those that were ignored (as nohup does); the handlers that they had before."""
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def end_at_once(numbers: Iterable[int] = STOP) -> dict[int, Handler]:
    """Let signals end this process with one line, whatever it is in the middle of; the handlers before.

    An exception would not do: modules that are being imported may lose it, or make another of it. Of many ranks the
    first speaks.
    """

    def end(number: int, _: FrameType | None) -> None:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            with suppress(OSError):
                os.write(2, f"megalite: stopped by {signal.Signals(number).name}\n".encode())
        os._exit(130 if number == signal.SIGINT else 3)

    before = listen(end, numbers)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # a batch script holds them up until there are handlers
    return before


def restore(handlers: dict[int, Handler]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
