"""Entry of the command `megalite`: it hears signals before it imports anything that takes time."""

import os
import sys
from contextlib import suppress
from importlib import import_module

from megalite.base.exit_codes import ExitCode
from megalite.base.stop_signals import end_at_once


def note_stop(code: int) -> None:
    """Tell a supervisor that this rank was asked to stop, as early as that was. Without one, nothing is imported."""
    if code == ExitCode.STOPPED and "MEGALITE_ATTEMPT" in os.environ:
        names = ("failure_report", "ranks")
        words, ranks = (import_module(f"megalite.distributed.start.{name}") for name in names)
        with suppress(ValueError):  # a launcher's variables contradict each other
            words.note_end(code, ranks.find_rank_info() or ranks.RankInfo(0, 1, 0))


def main() -> int:
    """The exit code of `megalite.commands.main.main`."""
    end_at_once(ExitCode.STOPPED if sys.argv[1:2] == ["train"] else ExitCode.INTERRUPTED, note_stop)
    code: int = import_module("megalite.commands.main").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
