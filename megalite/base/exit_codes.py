"""The exit codes of all commands; docs/exit_codes.md tells users what to do after each. Imports next to nothing."""

from collections.abc import Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of commands. A process that a signal has killed has another code: 128 and the signal's number."""

    DONE = 0
    FAILED = 1  # a comparison or a check, or the program itself, with a traceback
    BAD_INPUT = 2
    STOPPED = 3  # on request, to be continued
    UNHEALTHY = 4
    LOST_CONTACT = 5
    INTERRUPTED = 130  # as the shell gives it for SIGINT
    READER_LEFT = 141  # as the shell gives it for SIGPIPE


def table(meanings: Mapping[ExitCode, str]) -> str:
    """The exit codes of a command, for its help. A meaning may have several lines."""
    indented = {code: meaning.replace("\n", "\n" + " " * 7) for code, meaning in meanings.items()}
    return "exit codes:\n" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in indented.items())
