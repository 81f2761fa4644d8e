"""Tells how long layers took to compile: in the first step of a start, and when batches have another shape."""

from torch._dynamo.utils import calculate_time_spent, counters

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
