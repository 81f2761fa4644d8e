"""Collects Python's garbage on all ranks after the same steps.

A rank that collects stands still for milliseconds, and all others wait for it. Left to itself, each of a thousand ranks
would do so at another time, and some rank in almost every step.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class Garbage:
    """A context manager inside of which the collector is off. Leaving restores what was before.

    interval: steps between collections; 0: the collector stays as it is, and nothing here does anything.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._collects = gc.isenabled()

    def __enter__(self) -> "Garbage":
        self._collects = gc.isenabled()
        if self._interval:
            gc.collect()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()

    def stepped(self, step: int) -> None:
        """Collect after a step that is a multiple of the interval."""
        if self._interval and step % self._interval == 0:
            gc.collect()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Free memory before something that is no step, such as an evaluation; inside, the collector is as it was."""
        if not self._interval:
            yield
            return
        gc.collect()
        if self._collects:
            gc.enable()
        try:
            yield
        finally:
            gc.disable()
