"""The moment of a training step at which a rank holds most memory, in words."""

from dataclasses import dataclass, replace

from megalite.schedule.actions import Action, Exchange, Kind

PHASES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward without weight gradients",
    Kind.W: "weight gradients",
    Kind.GATHER: "gathering of weights",
    Kind.RESHARD: "freeing of weights",
}


@dataclass(frozen=True)
class Instant:
    """A moment of a step.

    doing: what the pipeline runner does, or a phase before or after it. part: of the model, such as `layer 3`; "" where
    no part is being computed. what: in the part, such as `attention`; "" if it has one moment only.
    """

    doing: Action | Exchange | str
    part: str = ""
    what: str = ""

    def __str__(self) -> str:
        if isinstance(self.doing, str):
            return self.doing
        if isinstance(self.doing, Exchange):
            return f"transfers between stages: {self.doing}"
        kind, stage, micro = self.doing
        where = ", ".join(filter(None, [self.part or f"stage {stage}", self.what]))
        return f"{PHASES[kind]} of {where}, micro-batch {micro}"

    def of_last(self, few: int, m: int) -> "Instant":
        """Return the moment for a step of `m` micro-batches, given one of `few` that begins and ends alike."""
        if isinstance(self.doing, Action) and self.doing.micro == few - 1:
            return replace(self, doing=self.doing._replace(micro=m - 1))
        return self
