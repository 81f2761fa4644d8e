"""Progress of a run: all of its state but weights and moments. Imports no torch."""

from dataclasses import dataclass
from math import isfinite

from megalite.config.schema import Config
from megalite.optim.rate import learning_rate
from megalite.plan.batches import joined


@dataclass(frozen=True)
class Progress:
    """The state of a run between two steps. Random numbers are functions of `run.seed` and of these fields."""

    step: int = 0  # optimizer steps taken, those that changed nothing included
    updates: int = 0  # steps among them that changed the weights: AdamW's own count
    samples: int = 0  # position in the data: sequences consumed, left-out ones included
    tokens: int = 0  # tokens trained on
    left_out: tuple[tuple[int, int], ...] = ()  # ranges of samples [first, end) passed over after a rollback
    bad_steps: int = 0
    losses: tuple[float, ...] = ()  # the latest, oldest first: what a spike is measured against


def impossible(progress: Progress) -> str | None:
    """Describe why no run can have this progress; None if a run can."""
    counts = {name: getattr(progress, name) for name in ("step", "updates", "samples", "tokens", "bad_steps")}
    if min(counts.values()) < 0 or counts["updates"] > counts["step"] or not all(map(isfinite, progress.losses)):
        return f"holds a progress that cannot be: {counts}"
    ranges = progress.left_out
    if any(first < 0 or first >= end for first, end in ranges) or joined(ranges) != ranges:
        return "leaves out ranges of samples that are not ascending and apart"
    return None


@dataclass(frozen=True)
class Training:
    """The run that has saved an optimizer's states. config: its configuration, as far as its files tell it."""

    progress: Progress
    config: Config

    @property
    def rate(self) -> float:
        """The learning rate of its latest step."""
        config = self.config
        return learning_rate(config.schedule, config.optim.lr, config.train.steps, max(self.progress.step - 1, 0))
