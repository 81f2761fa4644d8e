"""End of every command: messages on stderr and the exit code."""

import os
import sys
from collections.abc import Callable

from megalite.base.errors import InputError, Unhealthy, printable
from megalite.base.exit_codes import ExitCode
from megalite.base.output import Lost, give_up, standard_streams
from megalite.base.stop_signals import Stopped

TRACEBACK = "MEGALITE_TRACEBACK"  # environment: set, what the system refuses is shown with the place in the code


def exit_code(command: str, work: Callable[[], int | None]) -> int:
    """Do `work` and return its exit code, DONE where it gives none.

    UNHEALTHY is for a disk that is full before there are ranks. BAD_INPUT is also for a file that the system refuses
    and a stdout that cannot be written to. All errors are told on stderr.
    """
    standard_streams(give_up)
    try:
        try:
            return work() or ExitCode.DONE
        finally:
            sys.stdout.flush()
    except InputError as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except Unhealthy as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return ExitCode.UNHEALTHY
    except Lost as lost:
        if str(lost):
            print(f"{command}: error: {lost}", file=sys.stderr)
        return lost.code
    except OSError as error:  # the last resort: whoever uses a path says what it is for
        if error.filename is None or TRACEBACK in os.environ:
            raise
        told = printable(f"{error.filename!s:.400}: {error.strerror}")
        print(f"{command}: error: {told}; {TRACEBACK}=1 shows where in the code", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except Stopped as stopped:
        print(f"{command}: {stopped}", file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
