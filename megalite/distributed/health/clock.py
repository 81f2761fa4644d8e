"""Time that this rank works by itself, section by section: without the time that it waits for other ranks.

Whoever waits for a collective or a message calls `Work.wait`, FSDP2 too. On a CPU that takes as long as the others
do. On a GPU it only holds the stream up, and FSDP2 also holds it up by events; both are timed by CUDA events before and
after, which are read when the device has passed them, so that nothing waits for it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

COMPUTING = "computing"  # begin of the names of threads that train beside the main one
LAG = 3  # steps after which a GPU has surely passed an event: by then, the vital signs of the next step were read


@dataclass
class Span:
    """One passage through a section: when it began and ended, and its waits. Times are seconds, or CUDA events."""

    section: str
    marks: list[Any]
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class SectionClock:
    """Times sections; without `running`, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: Span | None = None
        self._stream: Any = None  # on which a section runs
        self._step: list[Span] = []
        self._steps: deque[list[Span]] = deque()
        self._runs = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time sections meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(dist.Work, "wait", self._timed(dist.Work.wait)))
            if self._cuda:
                wait_event = torch.cuda.Stream.wait_event
                stack.enter_context(patch.object(torch.cuda.Stream, "wait_event", self._timed(wait_event)))
            self._runs = True
            try:
                yield
            finally:
                self._runs = False

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        """Time what is done meanwhile. Sections do not nest."""
        if not self._runs:
            yield
            return
        self._stream = torch.cuda.current_stream() if self._cuda else None
        span = self._open = Span(section, [self._mark()])
        try:
            yield
        finally:
            self._open = None
        span.marks.append(self._mark())
        self._step.append(span)

    def stepped(self) -> dict[str, float]:
        """Begin another step. Returns the seconds of a step that is over, by section; of none yet, nothing."""
        self._steps.append(self._step)
        self._step = []
        if len(self._steps) <= (LAG if self._cuda else 0):
            return {}
        found: dict[str, float] = {}
        for span in self._steps.popleft():
            waited = sum(self._seconds(*wait) for wait in span.waits)
            found[span.section] = found.get(span.section, 0.0) + self._seconds(*span.marks) - waited
        return found

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable  # waits of context parallelism stand between a compiled layer's graphs
        def timed(*args: Any, **options: Any) -> Any:
            span = self._open
            if span is None or not _computes(threading.current_thread()) or not self._holds_up(args[0]):
                return wait(*args, **options)
            before = self._mark()
            result = wait(*args, **options)
            span.waits.append((before, self._mark()))
            return result

        return timed

    def _holds_up(self, waits: object) -> bool:
        """Return whether the section waits, and not another stream that communicates beside it."""
        if not self._cuda:
            return True
        return torch.cuda.current_stream() == self._stream and (
            not isinstance(waits, torch.cuda.Stream) or waits == self._stream
        )

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3 if self._cuda else last - first


def _computes(thread: threading.Thread) -> bool:
    """Return whether a thread trains: the main one, one that says so, or autograd's, which Python did not start."""
    own = thread is threading.main_thread() or thread.name.startswith(COMPUTING)
    return own or isinstance(thread, threading._DummyThread)
