"""Activity of a rank: the notes that it takes, and where its threads are. The watchdog sends it to other ranks."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parents[2]
HIDDEN_PREFIX = "watchdog"  # threads whose names begin like this are not shown


class Awaiting:
    """A note of waiting for messages."""

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that have to send or to take them."""
        raise NotImplementedError


class Activity:
    """The latest thing that a rank has begun. To note it costs one assignment; any thread may read it."""

    def __init__(self) -> None:
        self.step = 0  # the optimizer step that is under way
        self.asked: Collection[int] = ()  # signals by which this rank was asked to stop
        self.follower: Callable[[object], None] | None = None  # told of every note, and of rests by None
        self("starting")
        self.tick()

    def __call__(self, what: object) -> None:
        """Note that `what` begins now; it is turned into text only if somebody asks."""
        self.now = what, time.monotonic()
        if self.follower is not None:
            self.follower(what)

    def rest(self) -> None:
        """Tell who follows that the latest note is over; this thread makes the next one when it goes on."""
        if self.follower is not None:
            self.follower(None)

    def tick(self) -> None:
        """Note progress of work that is long or in the background, such as one more piece of a checkpoint."""
        self.ticked = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the latest sign of progress."""
        return time.monotonic() - max(self.now[1], self.ticked)


def locations() -> str:
    """The line of code that the main thread is at, and that of every other thread in this package."""
    frames = sys._current_frames()
    main = threading.main_thread()
    found = [_location(frames[main.ident]) if main.ident in frames else "nowhere"]
    for thread in threading.enumerate():
        if thread is not main and thread.ident in frames and not thread.name.startswith(HIDDEN_PREFIX):
            location = _location(frames[thread.ident])
            if location.startswith(PACKAGE.name):
                found.append(f"thread {thread.name} at {location}")
    return "; ".join(found)


def stacks() -> str:
    """The stacks of all threads, for a log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if not names.get(ident, "").startswith(HIDDEN_PREFIX)
    )


def _location(innermost: FrameType) -> str:
    """The innermost line of this package, and what it has called in another: `FILE:LINE NAME, in NAME`."""
    inside = f"{innermost.f_globals.get('__name__', '?')}.{innermost.f_code.co_name}"
    frame: FrameType | None = innermost
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            location = f"{path.relative_to(PACKAGE.parent)}:{frame.f_lineno} {frame.f_code.co_name}"
            return location if frame is innermost else f"{location}, in {inside}"
        frame = frame.f_back
    return inside
