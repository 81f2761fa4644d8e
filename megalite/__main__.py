"""Where the command `megalite` begins: it hears signals before it imports anything that takes time."""

import os
import sys
from contextlib import suppress
from importlib import import_module

from megalite.exit_codes import ExitCode
from megalite.stop import end_at_once


def note_stop(code: int) -> None:
    """Tell a supervisor that this rank was asked to stop, as early as that was. Without one, nothing is imported."""
    if code == ExitCode.STOPPED and "MEGALITE_ATTEMPT" in os.environ:
        words, ranks = (import_module(f"megalite.dist.{name}") for name in ("last_words", "ranks"))
        with suppress(ValueError):  # a launcher's variables contradict each other
            words.note_end(code, ranks.find_rank_info() or ranks.RankInfo(0, 1, 0))


def main() -> int:
    """The exit code of `megalite.cli.main`."""
    end_at_once(ExitCode.STOPPED if sys.argv[1:2] == ["train"] else ExitCode.INTERRUPTED, note_stop)
    code: int = import_module("megalite.cli").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
