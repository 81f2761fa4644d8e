"""What the programs have in common: how they end."""

import signal
import sys
from collections.abc import Callable

from megalite.config.errors import InputError


def exit_code(command: str, work: Callable[[], int | None]) -> int:
    """Do `work` and return its exit code, or 0; 2: bad input, told on stderr; 130: interrupted, nothing written."""
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # in place of that of `commands`
        return work() or 0
    except InputError as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: interrupted; nothing was written", file=sys.stderr)
        return 130
