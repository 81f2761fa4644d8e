"""A group of layouts whose layers take equally long. Imports no torch."""

from dataclasses import dataclass

from megalite.config.parallel_schema import DataMode
from megalite.cost.layout_choice import Choice
from megalite.layout_search.pipeline_bounds import Passes
from megalite.layout_search.turn_bounds import Pairs

MODES: list[DataMode] = ["ddp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True, eq=False)  # which makes it a quick key
class Shape:
    """Layouts that share everything that decides the time of layers.

    passes: at least. paired: whether their schedules have passes take turns. pairs: of these, where it is
    known in which order stages have their layers. alone: passes that do not take turns. hop: seconds to
    send a micro-batch's activations to the next pipeline rank. computes: seconds until the last backward pass of a step
    has ended, at least. update: those of the optimizer in the best of the layouts.
    """

    choice: Choice  # choice of its first layout
    micro_batches: int
    dp: int
    passes: Passes
    paired: bool
    pairs: Pairs | None
    alone: Passes
    hop: float
    computes: float
    update: float

    @property
    def bound(self) -> float:
        """Seconds of the whole step at least."""
        return self.computes + self.update

    def modes(self, on_host: bool) -> list[DataMode]:
        """Modes of data parallelism to try. on_host: parameters live there, so that weights are gathered, or copied for
        every use."""
        if self.dp * self.choice.cp == 1:
            return ["zero3" if on_host else "zero1"]
        once = self.micro_batches == 1  # gradients are reduced once in any case
        left_out = ["ddp"] * on_host + ["zero2"] * once
        return [mode for mode in MODES if mode not in left_out]
