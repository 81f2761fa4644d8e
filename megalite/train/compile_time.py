"""Tells how long layers took to compile: in the first step of a start, and when batches have another shape."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import calculate_time_spent, counters

from megalite.distributed.health.activity import Activity
from megalite.plan.batches import GlobalBatch
from megalite.train.metrics import Meter
from megalite.train.report import Silent


class CompileTime:
    """Graphs that the compiler has made in this process; those that are new are told after a step."""

    def __init__(self) -> None:
        self._graphs, self._seconds = counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"]

    def stepped(self, step: int, batch: GlobalBatch, meter: Meter, report: Silent) -> None:
        """Report what has been compiled since the step before, if anything."""
        if (graphs := counters["stats"]["unique_graphs"]) == self._graphs:
            return
        seconds = calculate_time_spent()["total_wall_time"]
        new = graphs - self._graphs
        report.say(f"compiled {new} graph{'s' * (new > 1)} of layers in {seconds - self._seconds:.1f} s")
        self._graphs, self._seconds = graphs, seconds


@contextmanager
def progressing(activity: Activity) -> Iterator[None]:
    """Take the begin and the end of every compilation for signs of progress.

    Kinds of layers are compiled one after another in the first step, together perhaps for longer than a rank may stand.
    """

    def tick(*_: object) -> None:
        activity.tick()

    callback_handler.register_start_callback(tick)
    callback_handler.register_end_callback(tick)
    try:
        yield
    finally:
        for remove in (callback_handler.remove_start_callback, callback_handler.remove_end_callback):
            with suppress(ValueError):  # PyTorch forgets all that is registered when it is reset
                remove(tick)
