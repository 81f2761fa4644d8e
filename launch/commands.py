"""Entry points of the installed programs; each imports its program only when it is called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def _program(module: str) -> Callable[[], int]:
    def main() -> int:
        code: int = import_module(f"megalite_launch.{module}").main()
        return code

    return main


preflight = _program("preflight.main")
