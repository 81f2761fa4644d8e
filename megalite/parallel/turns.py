"""A forward and a backward pass that take turns at computing: while one waits for the network, the other computes.

Forward has a thread of its own. Only one of the two runs at a time, until it gives way, which it does at places in the
code and not by the clock. So ranks whose layers are alike begin all collectives in the same order.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from megalite.distributed.health.clock import COMPUTING

T = TypeVar("T")
_thread = ThreadPoolExecutor(1, COMPUTING)  # for forwards; it starts with the first
_turns: "Turns[Any] | None" = None  # the two passes that run


class OtherFailed(Exception):
    """The other pass has failed, so this one must not go on."""


class Turns(Generic[T]):
    """The turns of two passes.

    resumed: called when a pass goes on, with whether it is forward. rests: called when it stops.
    """

    def __init__(self, forward: Callable[[], T], resumed: Callable[[bool], None], rests: Callable[[], None]) -> None:
        self._forward, self._resumed, self._rests = forward, resumed, rests
        self._turn = {True: threading.Semaphore(0), False: threading.Semaphore(0)}  # by whether it is forward's
        self._ident = 0  # number of forward's thread
        self._alone = self._failed = False

    def run(self, backward: Callable[[], None]) -> T:
        """Begin with forward, and go on until both are done. Returns what forward does. Raises what either raises."""
        global _turns
        _turns = self
        self._rests()
        made = _thread.submit(self._run, _surroundings())
        try:
            self._take(False)
            backward()
        except OtherFailed as stopped:
            raise made.exception() or stopped from None
        except BaseException:
            self._failed = True
            raise
        finally:
            self._leave(False)
            wait([made])
            _turns = None
        return made.result()

    def give_way(self) -> None:
        """Let the other pass compute until it gives way or ends."""
        if not self._alone:
            # Backward of a GPU runs on threads of autograd's, so all that is not forward is backward.
            forward = threading.get_ident() == self._ident
            self._rests()
            self._turn[not forward].release()
            self._take(forward)

    def _run(self, surroundings: AbstractContextManager[None]) -> T:
        self._ident = threading.get_ident()
        self._resumed(True)
        try:
            with surroundings:
                return self._forward()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._leave(True)

    def _take(self, forward: bool) -> None:
        self._turn[forward].acquire()
        if self._failed:
            raise OtherFailed
        self._resumed(forward)

    def _leave(self, forward: bool) -> None:
        self._alone = True
        self._rests()
        self._turn[not forward].release()


def give_way() -> None:
    """Let the pass beside this one compute, if there is one. To be called while something is on its way."""
    if _turns is not None:
        _turns.give_way()


def _surroundings() -> AbstractContextManager[None]:
    """Return what another thread enters to run as this one: its stream, and the modes by which a dry run counts."""
    modes = _get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered() -> Iterator[None]:
        for mode in modes:
            _push_mode(mode)
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                yield
        finally:
            for mode in reversed(modes):
                _pop_mode(getattr(mode, "_mode_key", None))

    return entered()
