"""Entry of the command `megalite`: it hears signals before it imports anything that takes time."""

import os
import sys
from contextlib import suppress
from importlib import import_module

from megalite.base.exit_codes import ExitCode
from megalite.base.stop_signals import end_at_once

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # environment: PyTorch's CUDA memory; an older name


def note_stop(code: int) -> None:
    """Tell a supervisor that this rank was asked to stop, however early. Without a supervisor, nothing is imported."""
    if code == ExitCode.STOPPED and "MEGALITE_ATTEMPT" in os.environ:
        names = ("failure_report", "ranks")
        words, ranks = (import_module(f"megalite.distributed.start.{name}") for name in names)
        with suppress(ValueError):  # a launcher's variables contradict each other
            words.note_end(code, ranks.find_rank_info() or ranks.RankInfo(0, 1, 0))


def main() -> int:
    """The exit code of `megalite.commands.main.main`."""
    if not any(name in os.environ for name in ALLOCATOR):  # PyTorch reads it when it is imported
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"  # freed memory is used again whatever the size was
    end_at_once(ExitCode.STOPPED if sys.argv[1:2] == ["train"] else ExitCode.INTERRUPTED, note_stop)
    code: int = import_module("megalite.commands.main").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
