"""Entry points of the installed programs. Each imports what it needs when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

INTERRUPTED, READER_LEFT = 130, 141  # docs/exit_codes.md


def _program(module: str) -> Callable[[], int]:
    def main() -> int:
        program: Callable[[Sequence[str]], int] = import_module(f"megalite_launch.{module}").main
        try:
            code = program(sys.argv[1:])
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing is said as Python ends
            return READER_LEFT

    return main


preflight = _program("preflight.main")
